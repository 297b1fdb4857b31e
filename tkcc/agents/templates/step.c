/* One forward step of a Llama-family decoder on one CPU core, over paged keys and values, in float32.
 *
 * Weights are packed in tiles of 64 outputs: tile[in][64], so that a tile is one stream of memory and no sum crosses
 * lanes. With WEIGHT_BITS 16 they are kept as bfloat16 and widened in registers: exact where the checkpoint is bfloat16,
 * and half the bytes to read. Attention reads pages where they lie.
 *
 * Compile-time parameters: WEIGHT_BITS (16, 32), HEAD_DIM, ROW_BLOCK (rows of x kept in cache while weights pass),
 * PREFETCH_BYTES (how far ahead weights are asked for), CHUNK (positions of context at a time), QK_NORM (0, 1).
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
#define DV (HEAD_DIM / 16)

INLINE v16 all(float s) { return s - (v16){0}; }
INLINE v16 choose(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }
INLINE v16 larger(v16 a, v16 b) { return choose(a > b, a, b); }

INLINE float sum_lanes(v16 v) {
  float s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
}

INLINE float max_lanes(v16 v) {
  float s = v[0];
  for (int i = 1; i < 16; i++) s = s > v[i] ? s : v[i];
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

/* --- linear: y[T, O] = x[T, I] w[O, I]^T (+ add) --- */

#if WEIGHT_BITS == 16
typedef uint16_t weight;
INLINE v16 widen(const weight *p) { return (v16)(__builtin_convertvector(*(const h16 *)p, u16) << 16); }
#else
typedef float weight;
INLINE v16 widen(const weight *p) { return LOAD(p); }
#endif

/* Sums run over SUM_BLOCK inputs at a time and are then added up: rounding errors grow with the blocks, not the inputs. */
#define SUM_BLOCK 192

/* R rows of x against one tile; n <= 64 outputs are wanted */
#define TILE_ROWS(R)                                                                                                    \
  static void tile_rows##R(const float *x, long ldx, const weight *w, float *y, long ldy, long I, long n,             \
                           const float *add) {                                                                         \
    v16 total[R][4];                                                                                                   \
    for (int r = 0; r < R; r++)                                                                                        \
      for (int j = 0; j < 4; j++) total[r][j] = (v16){0};                                                              \
    for (long i0 = 0; i0 < I; i0 += SUM_BLOCK) {                                                                       \
      long end = i0 + SUM_BLOCK < I ? i0 + SUM_BLOCK : I;                                                              \
      v16 a[R][4];                                                                                                     \
      for (int r = 0; r < R; r++)                                                                                      \
        for (int j = 0; j < 4; j++) a[r][j] = (v16){0};                                                                \
      for (long i = i0; i < end; i++) {                                                                                \
        const weight *p = w + i * 64;                                                                                  \
        __builtin_prefetch((const char *)p + PREFETCH_BYTES, 0, 3);                                                    \
        __builtin_prefetch((const char *)p + PREFETCH_BYTES + 64, 0, 3);                                               \
        v16 w0 = widen(p), w1 = widen(p + 16), w2 = widen(p + 32), w3 = widen(p + 48);                                 \
        UNROLL for (int r = 0; r < R; r++) {                                                                           \
          v16 s = all(x[r * ldx + i]);                                                                                 \
          a[r][0] += s * w0;                                                                                           \
          a[r][1] += s * w1;                                                                                           \
          a[r][2] += s * w2;                                                                                           \
          a[r][3] += s * w3;                                                                                           \
        }                                                                                                              \
      }                                                                                                                \
      for (int r = 0; r < R; r++)                                                                                      \
        for (int j = 0; j < 4; j++) total[r][j] += a[r][j];                                                            \
    }                                                                                                                  \
    for (int r = 0; r < R; r++) {                                                                                      \
      float *out = y + r * ldy;                                                                                        \
      const float *more = add ? add + r * ldy : 0, *t = (const float *)total[r];                                       \
      if (n == 64)                                                                                                     \
        for (int j = 0; j < 4; j++) STORE(out + 16 * j) = total[r][j] + (more ? LOAD(more + 16 * j) : (v16){0});       \
      else                                                                                                             \
        for (long k = 0; k < n; k++) out[k] = t[k] + (more ? more[k] : 0.0f);                                          \
    }                                                                                                                  \
  }
TILE_ROWS(1)
TILE_ROWS(2)
TILE_ROWS(3)
TILE_ROWS(4)
TILE_ROWS(5)
TILE_ROWS(6)

static void linear(const float *x, const weight *w, float *y, long T, long I, long O, const float *add) {
  for (long t0 = 0; t0 < T; t0 += ROW_BLOCK) {
    long t1 = t0 + ROW_BLOCK < T ? t0 + ROW_BLOCK : T;
    for (long o = 0; o < O; o += 64) {
      const weight *tile = w + o * I;
      long n = O - o < 64 ? O - o : 64;
      for (long t = t0; t < t1;) {
        long left = t1 - t;
        const float *xt = x + t * I, *at = add ? add + t * O + o : 0;
        float *yt = y + t * O + o;
        /* 4 + 4 beats 6 + 2, and 4 + 3 beats 6 + 1 */
        long rows = left == 7 || left == 8 ? 4 : left < 6 ? left : 6;
        switch (rows) {
          case 1: tile_rows1(xt, I, tile, yt, O, I, n, at); break;
          case 2: tile_rows2(xt, I, tile, yt, O, I, n, at); break;
          case 3: tile_rows3(xt, I, tile, yt, O, I, n, at); break;
          case 4: tile_rows4(xt, I, tile, yt, O, I, n, at); break;
          case 5: tile_rows5(xt, I, tile, yt, O, I, n, at); break;
          default: tile_rows6(xt, I, tile, yt, O, I, n, at); break;
        }
        t += rows;
      }
    }
  }
}

/* --- norm, RoPE --- */

static void rms_norm(const float *x, const float *w, float *y, long T, long n, float eps) {
  for (long t = 0; t < T; t++, x += n, y += n) {
    float s = 0;
    for (long i = 0; i < n; i++) s += x[i] * x[i];
    float r = 1.0f / sqrtf(s / n + eps);
    for (long i = 0; i < n; i++) y[i] = x[i] * r * w[i];
  }
}

static void rotate(float *x, const float *cos_r, const float *sin_r) {
  for (long i = 0; i < D / 2; i++) {
    float a = x[i], b = x[i + D / 2];
    x[i] = a * cos_r[i] - b * sin_r[i];
    x[i + D / 2] = b * cos_r[i] + a * sin_r[i];
  }
}

/* --- attention of one request's new tokens for the heads of one KV head, over its pages --- */

typedef struct {
  const float *k, *v; /* this layer's and this KV head's part of block 0 */
  long block_stride;  /* elements from one block to the next */
  const int64_t *pages;
  long S; /* slots of a block */
} Pages;

INLINE const float *slot(const float *base, const Pages *p, long position) {
  return base + p->pages[position / p->S] * p->block_stride + position % p->S * D;
}

/* lane i of the result = sum of the lanes of v[i]; a tree of 15 adds in place of 16 sums across lanes */
INLINE v16 sum_each(v16 *v) {
  for (int i = 0; i < 8; i++) {
    v16 a = v[i], b = v[i + 8];
    v[i] = __builtin_shuffle(a, b, (i16){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
           __builtin_shuffle(a, b, (i16){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  }
  for (int i = 0; i < 4; i++) {
    v16 a = v[i], b = v[i + 4];
    v[i] = __builtin_shuffle(a, b, (i16){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}) +
           __builtin_shuffle(a, b, (i16){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
  }
  for (int i = 0; i < 2; i++) {
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
  float *out;       /* [rows][D], not yet divided by sum */
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
  for (int j = 0; j < DV; j++) STORE(s->out + row * D + 16 * j) *= fade;
}

/* One row's scores by dot products: 16 positions share one tree of sums. */
INLINE void scores_of_row(const float *q, const Pages *p, long c0, long len, float *score) {
  v16 qv[DV];
  for (int j = 0; j < DV; j++) qv[j] = LOAD(q + 16 * j);
  for (long g = 0; g < len; g += 16) {
    v16 part[16];
    UNROLL for (int i = 0; i < 16; i++) {
      long c = g + i < len ? g + i : len - 1;
      const float *k = slot(p->k, p, c0 + c);
      part[i] = qv[0] * LOAD(k);
      for (int j = 1; j < DV; j++) part[i] += qv[j] * LOAD(k + 16 * j);
    }
    STORE(score + g) = sum_each(part);
  }
}

/* q, out: [n * G][D], row = token * G + head; scratch: 2 * n * G + D * CHUNK floats */
static void attend(const float *q, long n, long G, const Pages *p, long context, float scale, float *out,
                   float *scratch) {
  long rows = n * G;
  Softmax s = {scratch, scratch + rows, out};
  float *kt = scratch + 2 * rows; /* keys of the chunk, transposed: [D][CHUNK] */
  float score[ROWS][CHUNK] __attribute__((aligned(64)));
  for (long r = 0; r < rows; r++) s.max[r] = -INFINITY, s.sum[r] = 0;
  memset(out, 0, rows * D * sizeof(float));
  int is_transposed = rows > FEW_ROWS;
  for (long c0 = 0; c0 < context; c0 += CHUNK) {
    long len = context - c0 < CHUNK ? context - c0 : CHUNK;
    if (is_transposed)
      for (long c = 0; c < len; c++) {
        const float *k = slot(p->k, p, c0 + c);
        for (int d = 0; d < D; d++) kt[d * CHUNK + c] = k[d];
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
      if (is_transposed) {
        const float *qr[ROWS];
        for (long r = 0; r < ROWS; r++) qr[r] = q + (r < num ? r0 + r : r0) * D;
        for (long g = 0; g < padded; g += 32) { /* CHUNK is a multiple of 32 */
          v16 a[ROWS][2];
          for (int r = 0; r < ROWS; r++) a[r][0] = a[r][1] = (v16){0};
          for (int d = 0; d < D; d++) {
            v16 k0 = LOAD(kt + d * CHUNK + g), k1 = LOAD(kt + d * CHUNK + g + 16);
            UNROLL for (int r = 0; r < ROWS; r++) {
              v16 x = all(qr[r][d]);
              a[r][0] += x * k0;
              a[r][1] += x * k1;
            }
          }
          for (int r = 0; r < ROWS; r++) STORE(&score[r][g]) = a[r][0] * scale, STORE(&score[r][g + 16]) = a[r][1] * scale;
        }
      } else {
        for (long r = 0; r < num; r++) {
          scores_of_row(q + (r0 + r) * D, p, c0, most, score[r]);
          for (long g = 0; g < padded; g += 16) STORE(&score[r][g]) *= scale;
        }
      }
      for (long r = 0; r < ROWS; r++) {
        if (seen[r]) absorb(&s, r0 + r, score[r], seen[r], padded);
        for (long c = seen[r]; c < most; c++) score[r][c] = 0;
      }
      v16 a[ROWS][DV];
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < DV; j++) a[r][j] = (v16){0};
      for (long c = 0; c < most; c++) {
        const float *v = slot(p->v, p, c0 + c);
        UNROLL for (int r = 0; r < ROWS; r++) {
          v16 x = all(score[r][c]);
          for (int j = 0; j < DV; j++) a[r][j] += x * LOAD(v + 16 * j);
        }
      }
      for (long r = 0; r < num; r++)
        if (seen[r])
          for (int j = 0; j < DV; j++) STORE(out + (r0 + r) * D + 16 * j) += a[r][j];
    }
  }
  for (long r = 0; r < rows; r++)
    for (int j = 0; j < DV; j++) STORE(out + r * D + 16 * j) /= s.sum[r];
}

/* --- the step --- */

typedef struct {
  const float *input_norm, *post_norm, *q_norm, *k_norm;
  const weight *q, *kv, *o, *gate_up, *down;
} Layer;

typedef struct {
  long num_layers, hidden, heads, kv_heads, intermediate, vocab, block_tokens, num_blocks;
  float eps, scale;
  const float *embed, *norm, *cos, *sin; /* cos, sin: [positions][D / 2] */
  const weight *head;
  const Layer *layers;
} Model;

typedef struct {
  long T, B, P;
  const int64_t *tokens, *positions, *slots, *pages, *starts, *contexts;
} Batch;

/* Floats of scratch that `step` needs for T tokens. */
long scratch_floats(const Model *m, long T) {
  long G = m->heads / m->kv_heads, per_token = 2 * m->hidden + 2 * (m->heads + m->kv_heads) * D + 2 * m->intermediate;
  return T * per_token + T * G * (2 * D + 2) + D * CHUNK + 256;
}

/* K and V of all tokens to their slots; K after RoPE. kv: [T][2 K D] */
static void write_kv(const Model *m, const Layer *w, const Batch *b, float *kv, float *k_layer, float *v_layer) {
  long K = m->kv_heads, S = m->block_tokens;
  for (long t = 0; t < b->T; t++) {
    float *row = kv + t * 2 * K * D;
    const float *c = m->cos + b->positions[t] * (D / 2), *s = m->sin + b->positions[t] * (D / 2);
    long at = b->slots[t] / S * K * S * D + b->slots[t] % S * D;
    for (long h = 0; h < K; h++) {
      float *k = row + h * D;
#if QK_NORM
      rms_norm(k, w->k_norm, k, 1, D, m->eps);
#endif
      rotate(k, c, s);
      memcpy(k_layer + at + h * S * D, k, D * sizeof(float));
      memcpy(v_layer + at + h * S * D, row + (K + h) * D, D * sizeof(float));
    }
  }
}

/* gate, up: [T][2 I] in, silu(gate) * up: [T][I] out, in place: row t of the result ends before row t + 1 is read */
static void gate(float *up, long T, long I) {
  for (long t = 0; t < T; t++) {
    const float *in = up + t * 2 * I;
    float *out = up + t * I;
    for (long i = 0; i < I; i += 16) {
      v16 g = LOAD(in + i), u = LOAD(in + I + i);
      STORE(out + i) = g / (1.0f + exp16(-g)) * u;
    }
  }
}

void step(const Model *m, const Batch *b, float *k_cache, float *v_cache, float *logits, float *scratch) {
  long T = b->T, d = m->hidden, H = m->heads, K = m->kv_heads, I = m->intermediate, G = H / K, S = m->block_tokens;
  long block = K * S * D, layer_stride = m->num_blocks * block;
  float *x = scratch, *y = x + T * d, *kv = y + T * d, *q = kv + T * 2 * K * D, *mixed = q + T * H * D;
  float *up = mixed + T * H * D, *q_rows = up + T * 2 * I, *out_rows = q_rows + T * G * D, *rest = out_rows + T * G * D;
  for (long t = 0; t < T; t++) memcpy(x + t * d, m->embed + b->tokens[t] * d, d * sizeof(float));
  for (long l = 0; l < m->num_layers; l++) {
    const Layer *w = m->layers + l;
    float *k_layer = k_cache + l * layer_stride, *v_layer = v_cache + l * layer_stride;
    rms_norm(x, w->input_norm, y, T, d, m->eps);
    linear(y, w->kv, kv, b->T, d, 2 * K * D, 0);
    write_kv(m, w, b, kv, k_layer, v_layer);
    int is_last = l == m->num_layers - 1;
    if (is_last) { /* nothing reads more of it than the last token of each request */
      for (long r = 0; r < b->B; r++) {
        memmove(x + r * d, x + (b->starts[r + 1] - 1) * d, d * sizeof(float));
        memmove(y + r * d, y + (b->starts[r + 1] - 1) * d, d * sizeof(float));
      }
      T = b->B;
    }
    linear(y, w->q, q, T, d, H * D, 0);
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
        for (long t = 0; t < n; t++)
          memcpy(q_rows + t * G * D, q + (t0 + t) * H * D + h * G * D, G * D * sizeof(float));
        attend(q_rows, n, G, &pages, b->contexts[r], m->scale, out_rows, rest);
        for (long t = 0; t < n; t++)
          memcpy(mixed + (t0 + t) * H * D + h * G * D, out_rows + t * G * D, G * D * sizeof(float));
      }
    }
    linear(mixed, w->o, x, T, H * D, d, x);
    rms_norm(x, w->post_norm, y, T, d, m->eps);
    linear(y, w->gate_up, up, T, d, 2 * I, 0);
    gate(up, T, I);
    linear(up, w->down, x, T, I, d, x);
  }
  rms_norm(x, m->norm, y, b->B, d, m->eps);
  linear(y, m->head, logits, b->B, d, m->vocab, 0);
}
