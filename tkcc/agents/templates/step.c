/* One forward step of a Llama-family decoder on one CPU core, over paged keys and values. Activations and sums are float32.
 *
 * Weights are packed in tiles of 64 outputs: tile[in][64], so that a tile is one stream of memory and no sum crosses
 * lanes. With WEIGHT_BITS 16 they are kept as bfloat16, two inputs in one 32-bit element, tile[in / 2][64][2], and widened
 * in registers: exact where the checkpoint is bfloat16, and half the bytes to read. Attention reads pages where they lie.
 *
 * Compile-time parameters: MODEL_BITS (of embeddings, keys and values: 16 for bfloat16, or 32), WEIGHT_BITS (16, 32),
 * DOT_ROWS (a product of at least so many rows rounds its input to bfloat16 and multiplies it by the CPU's own dot
 * product; 0: none does), HEAD_DIM, ROW_BLOCK (rows of x kept in cache while weights pass), PREFETCH_BYTES (how far ahead
 * weights are asked for), CHUNK (positions of context at a time, a multiple of 32), QK_NORM (0, 1).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2)));

#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) (*(const v16 *)(p))
#define STORE(p) (*(v16 *)(p))
#define UNROLL _Pragma("GCC unroll 16")
#define D HEAD_DIM
#define DV ((HEAD_DIM + 15) / 16) /* vectors of a head, the last one filled up with zeros */
#define DP (16 * DV)

INLINE v16 all(float s) { return s - (v16){0}; }
INLINE v16 choose(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }
INLINE v16 larger(v16 a, v16 b) { return choose(a > b, a, b); }

INLINE float sum_lanes(v16 v) {
  float s = 0;
  UNROLL for (int i = 0; i < 16; i++) s += v[i];
  return s;
}

INLINE float max_lanes(v16 v) {
  float s = v[0];
  UNROLL for (int i = 1; i < 16; i++) s = s > v[i] ? s : v[i];
  return s;
}

/* e^x, relative error about 1e-7 (the polynomial is Cephes'); 0 below -87 */
INLINE v16 exp16(v16 x) {
  v16 low = all(-87.3f);
  i16 is_tiny = x < low;
  x = larger(x, low);
  v16 t = x * 1.44269504f;
  i16 n = __builtin_convertvector(t + choose(t > all(0), all(0.5f), all(-0.5f)), i16);
  v16 k = __builtin_convertvector(n, v16);
  v16 r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  v16 p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return choose(is_tiny, all(0), p * (v16)((n + 127) << 23));
}

/* --- bfloat16 --- */

INLINE v16 widen(const uint16_t *p) { return (v16)(__builtin_convertvector(*(const h16 *)p, u16) << 16); }

/* To nearest, ties to even, NaN stays one: as torch rounds */
INLINE h16 narrow(v16 v) {
  u16 u = (u16)v;
  u = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return __builtin_convertvector((u16)choose(v != v, (v16)((u16){0} + 0x7fc0), (v16)u), h16);
}

/* An element of the cache and of the embeddings */
#if MODEL_BITS == 16
typedef uint16_t element;
INLINE v16 load(const element *p) { return widen(p); }
INLINE void store(element *p, v16 v) { *(h16 *)p = narrow(v); }
#else
typedef float element;
INLINE v16 load(const element *p) { return LOAD(p); }
INLINE void store(element *p, v16 v) { STORE(p) = v; }
#endif

/* n <= 16 of them; nothing beyond is touched */
INLINE v16 load_some(const element *p, long n) {
  if (n == 16) return load(p);
  element some[16] = {0};
  memcpy(some, p, n * sizeof(element));
  return load(some);
}

INLINE void store_some(element *p, v16 v, long n) {
  if (n == 16) {
    store(p, v);
    return;
  }
  element some[16];
  store(some, v);
  memcpy(p, some, n * sizeof(element));
}

INLINE v16 load_head(const element *p, int j) { return load_some(p + 16 * j, j < DV - 1 || D % 16 == 0 ? 16 : D % 16); }

/* As load_some, of float32. What is rare stays out of line: less for the compiler to do. */
static __attribute__((noinline)) v16 load_rest(const float *p, long n) {
  float some[16] = {0};
  memcpy(some, p, n * sizeof(float));
  return LOAD(some);
}

static __attribute__((noinline)) void store_rest(float *p, v16 v, long n) { memcpy(p, &v, n * sizeof(float)); }

INLINE v16 load_floats(const float *p, long n) { return n >= 16 ? LOAD(p) : load_rest(p, n); }

INLINE void store_floats(float *p, v16 v, long n) {
  if (n >= 16)
    STORE(p) = v;
  else
    store_rest(p, v, n);
}

/* --- linear: y[T, O] = x[T, I] w[O, I]^T (+ add) --- */

#if WEIGHT_BITS == 16
#define PAIR 2 /* inputs in one element */
typedef uint32_t weight;
INLINE v16 weights(const weight *p, int half) {
  u16 w = *(const u16 *)p;
  return (v16)(half ? w & 0xffff0000 : w << 16);
}
#else
#define PAIR 1
typedef float weight;
INLINE v16 weights(const weight *p, int half) { return LOAD(p); }
#endif

#if defined(__AVX512BF16__) && WEIGHT_BITS == 16 && DOT_ROWS
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

/* Sums run over SUM_BLOCK inputs at a time and are then added up: rounding errors grow with the blocks, not the inputs. */
#define SUM_BLOCK 192

/* a += input i of R rows times its weights; `half` says which half of the elements at p they are */
INLINE void fma_input(int R, v16 (*a)[4], const float *x, long ldx, const weight *p, int half) {
  v16 w[4];
  UNROLL for (int j = 0; j < 4; j++) w[j] = weights(p + 16 * j, half);
  UNROLL for (int r = 0; r < R; r++) {
    v16 s = all(x[r * ldx]);
    UNROLL for (int j = 0; j < 4; j++) a[r][j] += s * w[j];
  }
}

/* The same for both inputs of an element, x being pairs of bfloat16 */
INLINE void dot_inputs(int R, v16 (*a)[4], const uint32_t *x, long ldx, const weight *p) {
#if HAS_DOT
  v16 w[4];
  UNROLL for (int j = 0; j < 4; j++) w[j] = LOAD(p + 16 * j);
  UNROLL for (int r = 0; r < R; r++) {
    v16 s = all(((const float *)x)[r * ldx]);
    UNROLL for (int j = 0; j < 4; j++) __asm__("vdpbf16ps %2, %1, %0" : "+v"(a[r][j]) : "v"(s), "v"(w[j]));
  }
#endif
}

/* n of the 64 outputs of a row */
static __attribute__((noinline)) void add_row(v16 *total, const float *add, long n) {
  for (long j = 0; 16 * j < n; j++) total[j] += load_floats(add + 16 * j, n - 16 * j);
}

static __attribute__((noinline)) void store_row(const v16 *total, float *y, long n) {
  for (long j = 0; 16 * j < n; j++) store_floats(y + 16 * j, total[j], n - 16 * j);
}

/* R rows against one tile; n <= 64 outputs are wanted. ldx counts floats, or pairs where is_dot. */
INLINE void tile(int is_dot, int R, const void *x, long ldx, const weight *w, float *y, long ldy, long I, long n,
                 const float *add) {
  v16 total[6][4];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 4; j++) total[r][j] = (v16){0};
  long elements = is_dot ? (I + 1) / 2 : I / PAIR;
  for (long e0 = 0; e0 < elements; e0 += SUM_BLOCK / PAIR) {
    long end = e0 + SUM_BLOCK / PAIR < elements ? e0 + SUM_BLOCK / PAIR : elements;
    v16 a[6][4];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 4; j++) a[r][j] = (v16){0};
    for (long e = e0; e < end; e++) {
      const weight *p = w + e * 64;
#if PREFETCH_BYTES
      UNROLL for (int j = 0; j < 4; j++) __builtin_prefetch((const char *)(p + 16 * j) + PREFETCH_BYTES, 0, 3);
#endif
      if (is_dot)
        dot_inputs(R, a, (const uint32_t *)x + e, ldx, p);
      else
        UNROLL for (int half = 0; half < PAIR; half++) fma_input(R, a, (const float *)x + e * PAIR + half, ldx, p, half);
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 4; j++) total[r][j] += a[r][j];
  }
  if (!is_dot && I % PAIR) fma_input(R, total, (const float *)x + I - 1, ldx, w + elements * 64, 0);
  if (add) UNROLL for (int r = 0; r < R; r++) add_row(total[r], add + r * ldy, n);
  UNROLL for (int r = 0; r < R; r++) store_row(total[r], y + r * ldy, n);
}

#define TILE_ROWS(name, is_dot, R)                                                                                     \
  static void name##R(const void *x, long ldx, const weight *w, float *y, long ldy, long I, long n, const float *add) { \
    tile(is_dot, R, x, ldx, w, y, ldy, I, n, add);                                                                     \
  }
#define TILES(name, is_dot)                                                                                            \
  TILE_ROWS(name, is_dot, 1)                                                                                           \
  TILE_ROWS(name, is_dot, 2)                                                                                           \
  TILE_ROWS(name, is_dot, 3)                                                                                           \
  TILE_ROWS(name, is_dot, 4)                                                                                           \
  TILE_ROWS(name, is_dot, 5)                                                                                           \
  TILE_ROWS(name, is_dot, 6)                                                                                           \
  static const TileRows name[7] = {0, name##1, name##2, name##3, name##4, name##5, name##6};

typedef void (*TileRows)(const void *, long, const weight *, float *, long, long, long, const float *);
TILES(fma_rows, 0)
#if HAS_DOT
TILES(dot_rows, 1)
#else
#define dot_rows fma_rows
#endif

/* x: [T][I] floats to pairs of bfloat16, [T][(I + 1) / 2]; the last one of an odd row has a zero */
static void to_pairs(const float *x, long T, long I, uint32_t *pairs) {
  long ldp = (I + 1) / 2;
  for (long t = 0; t < T; t++, x += I, pairs += ldp)
    for (long i = 0; i < I; i += 16) {
      h16 h = narrow(load_floats(x + i, I - i));
      memcpy(pairs + i / 2, &h, I - i >= 16 ? 32 : 4 * (ldp - i / 2));
    }
}

/* pairs: scratch of ROW_BLOCK * (I + 1) / 2 */
static void linear(const float *x, const weight *w, float *y, long T, long I, long O, const float *add, uint32_t *pairs) {
  int is_dot = HAS_DOT && T >= DOT_ROWS;
  const TileRows *tile_rows = is_dot ? dot_rows : fma_rows;
  long ldx = is_dot ? (I + 1) / 2 : I, tile_size = (I + PAIR - 1) / PAIR * 64;
  for (long t0 = 0; t0 < T; t0 += ROW_BLOCK) {
    long t1 = t0 + ROW_BLOCK < T ? t0 + ROW_BLOCK : T;
    const char *block = (const char *)(x + t0 * I);
    if (is_dot) {
      to_pairs(x + t0 * I, t1 - t0, I, pairs);
      block = (const char *)pairs;
    }
    for (long o = 0; o < O; o += 64, w += tile_size) {
      for (long t = t0; t < t1;) {
        long left = t1 - t;
        /* 4 + 4 beats 6 + 2, and 4 + 3 beats 6 + 1 */
        long rows = left == 7 || left == 8 ? 4 : left < 6 ? left : 6;
        tile_rows[rows](block + (t - t0) * ldx * 4, ldx, w, y + t * O + o, O, I, O - o < 64 ? O - o : 64,
                        add ? add + t * O + o : 0);
        t += rows;
      }
    }
    w -= (O + 63) / 64 * tile_size;
  }
}

/* --- norm, RoPE --- */

static void rms_norm(const float *x, const float *w, float *y, long T, long n, float eps) {
  for (long t = 0; t < T; t++, x += n, y += n) {
    v16 squares = (v16){0};
    for (long i = 0; i < n; i += 16) {
      v16 v = load_floats(x + i, n - i);
      squares += v * v;
    }
    float r = 1.0f / sqrtf(sum_lanes(squares) / n + eps);
    for (long i = 0; i < n; i += 16)
      store_floats(y + i, load_floats(x + i, n - i) * r * load_floats(w + i, n - i), n - i);
  }
}

static void rotate(float *x, const float *cos_r, const float *sin_r) {
  for (long i = 0; i < D / 2; i += 16) {
    long n = D / 2 - i;
    v16 a = load_floats(x + i, n), b = load_floats(x + i + D / 2, n);
    v16 c = load_floats(cos_r + i, n), s = load_floats(sin_r + i, n);
    store_floats(x + i, a * c - b * s, n);
    store_floats(x + i + D / 2, b * c + a * s, n);
  }
}

/* --- attention of one request's new tokens for the heads of one KV head, over its pages --- */

typedef struct {
  const element *k, *v; /* this layer's and this KV head's part of block 0 */
  long block_stride;    /* elements from one block to the next */
  const int64_t *pages;
  long S; /* slots of a block */
} Pages;

/* Where positions c0 .. c0 + len - 1 are, in elements from the part of block 0 */
static void find(const Pages *p, long c0, long len, long *offset) {
  long page = c0 / p->S, slot = c0 % p->S;
  for (long c = 0; c < len; c++) {
    offset[c] = p->pages[page] * p->block_stride + slot * D;
    if (++slot == p->S) slot = 0, page++;
  }
}

/* lane i of the result = sum of the lanes of v[i]; a tree of 15 adds in place of 16 sums across lanes */
INLINE v16 sum_each(v16 *v) {
  UNROLL for (int i = 0; i < 8; i++) {
    v16 a = v[i], b = v[i + 8];
    v[i] = __builtin_shuffle(a, b, (i16){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
           __builtin_shuffle(a, b, (i16){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  }
  UNROLL for (int i = 0; i < 4; i++) {
    v16 a = v[i], b = v[i + 4];
    v[i] = __builtin_shuffle(a, b, (i16){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}) +
           __builtin_shuffle(a, b, (i16){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
  }
  UNROLL for (int i = 0; i < 2; i++) {
    v16 a = v[i], b = v[i + 2];
    v[i] = __builtin_shuffle(a, b, (i16){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
           __builtin_shuffle(a, b, (i16){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
  }
  v16 a = v[0], b = v[1];
  return __builtin_shuffle(a, b, (i16){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}) +
         __builtin_shuffle(a, b, (i16){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
}

#define FEW_ROWS 8 /* up to so many query rows, dot products beat transposing the keys */
#define ROWS 4     /* query rows at a time otherwise */

typedef struct {
  float *max, *sum; /* running softmax of each row */
  float *out;       /* [rows][DP], not yet divided by sum */
} Softmax;

/* Takes scores[len] of one row to probabilities, relative to the new running maximum. */
INLINE void absorb(Softmax *s, long row, float *score, long len, long padded) {
  for (long c = len; c < padded; c++) score[c] = -INFINITY;
  v16 top = LOAD(score);
  for (long c = 16; c < padded; c += 16) top = larger(top, LOAD(score + c));
  float now = max_lanes(top);
  if (s->max[row] > now) now = s->max[row];
  float fade = expf(s->max[row] - now);
  v16 total = (v16){0};
  for (long c = 0; c < padded; c += 16) {
    v16 e = exp16(LOAD(score + c) - now);
    STORE(score + c) = e;
    total += e;
  }
  s->sum[row] = s->sum[row] * fade + sum_lanes(total);
  s->max[row] = now;
  for (int j = 0; j < DV; j++) STORE(s->out + row * DP + 16 * j) *= fade;
}

/* One row's scores by dot products: 16 positions share one tree of sums. */
INLINE void scores_of_row(const float *q, const element *k, const long *offset, long len, float scale, float *score) {
  v16 qv[DV];
  UNROLL for (int j = 0; j < DV; j++) qv[j] = LOAD(q + 16 * j) * scale;
  for (long g = 0; g < len; g += 16) {
    v16 part[16];
    UNROLL for (int i = 0; i < 16; i++) {
      const element *row = k + offset[g + i < len ? g + i : len - 1];
      part[i] = qv[0] * load_head(row, 0);
      UNROLL for (int j = 1; j < DV; j++) part[i] += qv[j] * load_head(row, j);
    }
    STORE(score + g) = sum_each(part);
  }
}

/* ROWS rows' scores from transposed keys */
INLINE void scores_of_rows(const float *const *q, const float *kt, long padded, float scale, float (*score)[CHUNK]) {
  for (long g = 0; g < padded; g += 32) {
    v16 a[ROWS][2];
    UNROLL for (int r = 0; r < ROWS; r++) a[r][0] = a[r][1] = (v16){0};
    for (int d = 0; d < D; d++) {
      v16 k0 = LOAD(kt + d * CHUNK + g), k1 = LOAD(kt + d * CHUNK + g + 16);
      UNROLL for (int r = 0; r < ROWS; r++) {
        v16 x = all(q[r][d]);
        a[r][0] += x * k0;
        a[r][1] += x * k1;
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      STORE(&score[r][g]) = a[r][0] * scale;
      STORE(&score[r][g + 16]) = a[r][1] * scale;
    }
  }
}

/* out += scores times values, of `num` rows; values lie in pages, or copied to `copied` */
INLINE void add_values(int is_copied, float (*score)[CHUNK], const element *v, const long *offset, const float *copied,
                       long len, long num, float *out) {
  v16 a[ROWS][DV];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < DV; j++) a[r][j] = (v16){0};
  for (long c = 0; c < len; c++) {
    v16 row[DV];
    UNROLL for (int j = 0; j < DV; j++) row[j] = is_copied ? LOAD(copied + c * DP + 16 * j) : load_head(v + offset[c], j);
    UNROLL for (int r = 0; r < ROWS; r++) {
      v16 x = all(score[r][c]);
      UNROLL for (int j = 0; j < DV; j++) a[r][j] += x * row[j];
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    if (r < num) UNROLL for (int j = 0; j < DV; j++) STORE(out + r * DP + 16 * j) += a[r][j];
}

/* q, out: [n * G][DP], row = token * G + head; scratch: 2 * n * G + 2 * DP * CHUNK floats */
static void attend(const float *q, long n, long G, const Pages *p, long context, float scale, float *out,
                   float *scratch) {
  long rows = n * G, offset[CHUNK];
  Softmax s = {scratch, scratch + rows, out};
  float *kt = scratch + 2 * rows; /* keys of the chunk, transposed: [DP][CHUNK] */
  float *copied = kt + DP * CHUNK; /* its values, [CHUNK][DP] */
  float score[ROWS][CHUNK] __attribute__((aligned(64)));
  for (long r = 0; r < rows; r++) s.max[r] = -INFINITY, s.sum[r] = 0;
  memset(out, 0, rows * DP * sizeof(float));
  int is_copied = rows > FEW_ROWS;
  for (long c0 = 0; c0 < context; c0 += CHUNK) {
    long len = context - c0 < CHUNK ? context - c0 : CHUNK;
    find(p, c0, len, offset);
    if (is_copied)
      for (long c = 0; c < len; c++)
        for (int j = 0; j < DV; j++) {
          v16 k = load_head(p->k + offset[c], j);
          UNROLL for (int i = 0; i < 16; i++) kt[(16 * j + i) * CHUNK + c] = k[i];
          STORE(copied + c * DP + 16 * j) = load_head(p->v + offset[c], j);
        }
    for (long r0 = 0; r0 < rows; r0 += ROWS) {
      long num = rows - r0 < ROWS ? rows - r0 : ROWS, seen[ROWS], most = 0;
      for (long r = 0; r < ROWS; r++) { /* a token sees itself and what is before it */
        long limit = r < num ? context - n + (r0 + r) / G + 1 - c0 : 0;
        seen[r] = limit < 0 ? 0 : limit < len ? limit : len;
        if (seen[r] > most) most = seen[r];
      }
      if (most == 0) continue;
      long padded = (most + 15) / 16 * 16;
      if (is_copied) {
        const float *qr[ROWS];
        for (long r = 0; r < ROWS; r++) qr[r] = q + (r < num ? r0 + r : r0) * DP;
        scores_of_rows(qr, kt, padded, scale, score);
      } else
        for (long r = 0; r < num; r++) scores_of_row(q + (r0 + r) * DP, p->k, offset, most, scale, score[r]);
      for (long r = 0; r < ROWS; r++) {
        if (seen[r]) absorb(&s, r0 + r, score[r], seen[r], padded);
        for (long c = seen[r]; c < most; c++) score[r][c] = 0;
      }
      if (is_copied)
        add_values(1, score, p->v, offset, copied, most, num, out + r0 * DP);
      else
        add_values(0, score, p->v, offset, copied, most, num, out + r0 * DP);
    }
  }
  for (long r = 0; r < rows; r++)
    for (int j = 0; j < DV; j++) STORE(out + r * DP + 16 * j) /= s.sum[r];
}

/* --- the step --- */

typedef struct {
  const float *input_norm, *post_norm, *q_norm, *k_norm;
  const weight *q, *kv, *o, *gate_up, *down;
} Layer;

typedef struct {
  long num_layers, hidden, heads, kv_heads, intermediate, vocab, block_tokens, num_blocks;
  float eps, scale;
  const element *embed;
  const float *norm, *cos, *sin; /* cos, sin: [positions][D / 2] */
  const weight *head;
  const Layer *layers;
} Model;

typedef struct {
  long T, B, P;
  const int64_t *tokens, *positions, *slots, *pages, *starts, *contexts;
} Batch;

INLINE long most(long a, long b) { return a > b ? a : b; }

/* Floats of scratch that `step` needs for T tokens. */
long scratch_floats(const Model *m, long T) {
  long G = m->heads / m->kv_heads, per_token = 2 * m->hidden + 2 * (m->heads + m->kv_heads) * D + 2 * m->intermediate;
  long inputs = most(most(m->hidden, m->intermediate), m->heads * D);
  return T * per_token + T * G * (2 * DP + 2) + 2 * DP * CHUNK + ROW_BLOCK * (inputs + 1) / 2 + 256;
}

/* K and V of all tokens to their slots; K after RoPE. kv: [T][2 K D] */
static void write_kv(const Model *m, const Layer *w, const Batch *b, float *kv, element *k_layer, element *v_layer) {
  long K = m->kv_heads, S = m->block_tokens;
  for (long t = 0; t < b->T; t++) {
    float *row = kv + t * 2 * K * D;
    const float *c = m->cos + b->positions[t] * (D / 2), *s = m->sin + b->positions[t] * (D / 2);
    long at = b->slots[t] / S * K * S * D + b->slots[t] % S * D;
    for (long h = 0; h < K; h++) {
      float *k = row + h * D, *v = row + (K + h) * D;
#if QK_NORM
      rms_norm(k, w->k_norm, k, 1, D, m->eps);
#endif
      rotate(k, c, s);
      for (long i = 0; i < D; i += 16) {
        long n = D - i < 16 ? D - i : 16;
        store_some(k_layer + at + h * S * D + i, load_floats(k + i, n), n);
        store_some(v_layer + at + h * S * D + i, load_floats(v + i, n), n);
      }
    }
  }
}

/* gate, up: [T][2 I] in, silu(gate) * up: [T][I] out, in place: row t of the result ends before row t + 1 is read */
static void gate(float *up, long T, long I) {
  for (long t = 0; t < T; t++) {
    const float *in = up + t * 2 * I;
    float *out = up + t * I;
    for (long i = 0; i < I; i += 16) {
      v16 g = load_floats(in + i, I - i), u = load_floats(in + I + i, I - i);
      store_floats(out + i, g / (1.0f + exp16(-g)) * u, I - i);
    }
  }
}

/* n rows of one KV head's queries, from [n][H D] to [n * G][DP], or back */
static void take_heads(const float *q, long n, long G, long stride, float *rows) {
  for (long t = 0; t < n; t++)
    for (long g = 0; g < G; g++) memcpy(rows + (t * G + g) * DP, q + t * stride + g * D, D * sizeof(float));
}

static void put_heads(const float *rows, long n, long G, long stride, float *out) {
  for (long t = 0; t < n; t++)
    for (long g = 0; g < G; g++) memcpy(out + t * stride + g * D, rows + (t * G + g) * DP, D * sizeof(float));
}

void step(const Model *m, const Batch *b, element *k_cache, element *v_cache, float *logits, float *scratch) {
  long T = b->T, d = m->hidden, H = m->heads, K = m->kv_heads, I = m->intermediate, G = H / K, S = m->block_tokens;
  long block = K * S * D, layer_stride = m->num_blocks * block;
  float *x = scratch, *y = x + T * d, *kv = y + T * d, *q = kv + T * 2 * K * D, *mixed = q + T * H * D;
  float *up = mixed + T * H * D, *q_rows = up + T * 2 * I, *out_rows = q_rows + T * G * DP, *rest = out_rows + T * G * DP;
  uint32_t *pairs = (uint32_t *)(rest + 2 * T * G + 2 * DP * CHUNK);
  memset(q_rows, 0, T * G * DP * sizeof(float)); /* heads are filled up with zeros */
  for (long t = 0; t < T; t++) {
    const element *row = m->embed + b->tokens[t] * d;
    for (long i = 0; i < d; i += 16) {
      long n = d - i < 16 ? d - i : 16;
      store_floats(x + t * d + i, load_some(row + i, n), n);
    }
  }
  for (long l = 0; l < m->num_layers; l++) {
    const Layer *w = m->layers + l;
    element *k_layer = k_cache + l * layer_stride, *v_layer = v_cache + l * layer_stride;
    rms_norm(x, w->input_norm, y, T, d, m->eps);
    linear(y, w->kv, kv, b->T, d, 2 * K * D, 0, pairs);
    write_kv(m, w, b, kv, k_layer, v_layer);
    int is_last = l == m->num_layers - 1;
    if (is_last) { /* nothing reads more of it than the last token of each request */
      for (long r = 0; r < b->B; r++) {
        memmove(x + r * d, x + (b->starts[r + 1] - 1) * d, d * sizeof(float));
        memmove(y + r * d, y + (b->starts[r + 1] - 1) * d, d * sizeof(float));
      }
      T = b->B;
    }
    linear(y, w->q, q, T, d, H * D, 0, pairs);
    for (long r = 0; r < b->B; r++) {
      long t0 = is_last ? r : b->starts[r], n = is_last ? 1 : b->starts[r + 1] - t0;
      for (long t = 0; t < n; t++) {
        long position = b->contexts[r] - n + t;
        const float *c = m->cos + position * (D / 2), *s = m->sin + position * (D / 2);
        for (long h = 0; h < H; h++) {
          float *row = q + (t0 + t) * H * D + h * D;
#if QK_NORM
          rms_norm(row, w->q_norm, row, 1, D, m->eps);
#endif
          rotate(row, c, s);
        }
      }
      for (long h = 0; h < K; h++) {
        Pages pages = {k_layer + h * S * D, v_layer + h * S * D, block, b->pages + r * b->P, S};
        long at = t0 * H * D + h * G * D;
        take_heads(q + at, n, G, H * D, q_rows);
        attend(q_rows, n, G, &pages, b->contexts[r], m->scale, out_rows, rest);
        put_heads(out_rows, n, G, H * D, mixed + at);
      }
    }
    linear(mixed, w->o, x, T, H * D, d, x, pairs);
    rms_norm(x, w->post_norm, y, T, d, m->eps);
    linear(y, w->gate_up, up, T, d, 2 * I, 0, pairs);
    gate(up, T, I);
    linear(up, w->down, x, T, I, d, x, pairs);
  }
  rms_norm(x, m->norm, y, b->B, d, m->eps);
  linear(y, m->head, logits, b->B, d, m->vocab, 0, pairs);
}
