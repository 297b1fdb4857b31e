// Matrix-vector products over streamed units. Products of bf16 are exact in float, so the order of the additions is
// all that defines a result: over a lane's 16 columns, over the lanes (reduce_over_lanes), then over 512-column chunks.
// It does not depend on which CTA or warp does the work.

// A lane's 16 columns of x: as floats where registers allow, else as bf16 pairs.
struct Slice {
#if TKCC_BATCH <= 2
  float x[B][16];
#else
  u32 x[B][8];
#endif
  DEVICE void set(int b, int half, const U4& words) {
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#if TKCC_BATCH <= 2
      x[b][half * 8 + 2 * e] = low_half(w[e]);
      x[b][half * 8 + 2 * e + 1] = high_half(w[e]);
#else
      x[b][half * 4 + e] = w[e];
#endif
    }
  }
  DEVICE float low(int b, int half, int e) const {
#if TKCC_BATCH <= 2
    return x[b][half * 8 + 2 * e];
#else
    return low_half(x[b][half * 4 + e]);
#endif
  }
  DEVICE float high(int b, int half, int e) const {
#if TKCC_BATCH <= 2
    return x[b][half * 8 + 2 * e + 1];
#else
    return high_half(x[b][half * 4 + e]);
#endif
  }
};

// The input of a product: normalised in shared memory, or another stage's bf16 pairs, [B][columns / 2], polled.
struct Input {
  const Shared* shared;
  const Exchange* exchange;
  const u32* polled;  // null: the normalised one
  int columns, where;

  DEVICE void load(Slice& slice, int chunk, int lane) const {
    U4 words[B][2];
#pragma unroll
    for (int b = 0; b < B; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int column = chunk * UNIT_COLS + half * 256 + lane * 8;
        words[b][half] = U4{0, 0, 0, 0};
        if (!polled) words[b][half] = *(const U4*)&shared->x[b][column];
        else if (column < columns) words[b][half] = load_relaxed4(polled + (b * columns + column) / 2);
      }
#pragma unroll
    for (int b = 0; b < B; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int column = chunk * UNIT_COLS + half * 256 + lane * 8;
        if (polled && column < columns) exchange->finish4(words[b][half], polled + (b * columns + column) / 2, where);
        slice.set(b, half, words[b][half]);
      }
  }
};

// part[(chunk * groups + group) * SUMS + row * BP + b] = sum over the chunk's 512 columns.
DEVICE void multiply_units(Stream& stream, int groups, int chunks, float* part, const Input& input) {
  int units = groups * chunks, u = share(units, stream.warp), end = share(units, stream.warp + 1);
  if (u == end) return;
  int chunk = u / groups, group = u - chunk * groups, have = -1;
  const int lane = stream.lane;
  Slice slice;
  for (; u < end; ++u) {
    if (chunk != have) input.load(slice, chunk, lane), have = chunk;
    const U4* unit = stream.wait();
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      U4 rows[UNIT_ROWS];
#pragma unroll
      for (int r = 0; r < UNIT_ROWS; ++r) rows[r] = unit[(r * 2 + half) * 32 + lane];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int r = 0; r < UNIT_ROWS; ++r) {
          u32 word = e == 0 ? rows[r].x : e == 1 ? rows[r].y : e == 2 ? rows[r].z : rows[r].w;
          float low = low_half(word), high = high_half(word);
#pragma unroll
          for (int b = 0; b < B; ++b) {
            sums[r * BP + b] = fma_exact(low, slice.low(b, half, e), sums[r * BP + b]);
            sums[r * BP + b] = fma_exact(high, slice.high(b, half, e), sums[r * BP + b]);
          }
        }
      }
    }
    stream.release();
    reduce_over_lanes<SUMS>(sums, lane);
    if (lane < SUMS) part[(chunk * groups + group) * SUMS + reduced_index<SUMS>(lane)] = sums[0];
    if (++group == groups) group = 0, ++chunk;
  }
}

// The whole row's sum: chunks in ascending order. `row` counts within the pass's groups.
DEVICE float row_sum(const float* part, int groups, int chunks, int row, int b) {
  const float* at = part + (row / UNIT_ROWS) * SUMS + (row % UNIT_ROWS) * BP + b;
  float sum = at[0];
  for (int c = 1; c < chunks; ++c) sum = add_rn(sum, at[c * groups * SUMS]);
  return sum;
}

// RMS norm of the residual into shared.x as bf16. `source`: [B][D] float words of another stage, or, if null, the
// embeddings of this step's tokens. Ends with a barrier.
DEVICE void normalise(const Params& p, Shared& s, const Exchange& exchange, const u32* source, const u16* norm, int where) {
  constexpr int ROUNDS = ceil_div(D, NT * 4);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  U2 scale[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int d = (i * NT + tid) * 4;
    if (d < D) scale[i] = *(const U2*)(norm + d);
  }
  for (int b = 0; b < B; ++b) {
    U4 words[ROUNDS];
    if (source) {
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        int d = (i * NT + tid) * 4;
        if (d < D) words[i] = load_relaxed4(source + b * D + d);
      }
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        int d = (i * NT + tid) * 4;
        if (d < D) exchange.finish4(words[i], source + b * D + d, where);
      }
    } else {
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        int d = (i * NT + tid) * 4;
        if (d >= D) continue;
        U2 pairs = *(const U2*)(p.embed + (long long)s.token[b] * D + d);
        words[i].x = as_bits(low_half(pairs.x));
        words[i].y = as_bits(high_half(pairs.x));
        words[i].z = as_bits(low_half(pairs.y));
        words[i].w = as_bits(high_half(pairs.y));
      }
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if ((i * NT + tid) * 4 >= D) continue;
      const float r[4] = {as_float(words[i].x), as_float(words[i].y), as_float(words[i].z), as_float(words[i].w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) squares = add_rn(squares, mul_rn(r[e], r[e]));
    }
    squares = warp_sum(squares);
    if (b) sync_cta();  // the last sequence's sums have been read
    if (lane == 0) s.square_sums[warp] = squares;
    sync_cta();
    float total = s.square_sums[0];
    for (int w = 1; w < NW; ++w) total = add_rn(total, s.square_sums[w]);
    float rstd = div_rn(1.0f, sqrt_rn(add_rn(div_rn(total, (float)D), EPS)));
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      int d = (i * NT + tid) * 4;
      if (d >= D) continue;
      U2 pairs;
      pairs.x = pack_bf16(mul_rn(mul_rn(as_float(words[i].x), rstd), low_half(scale[i].x)),
                          mul_rn(mul_rn(as_float(words[i].y), rstd), high_half(scale[i].x)));
      pairs.y = pack_bf16(mul_rn(mul_rn(as_float(words[i].z), rstd), low_half(scale[i].y)),
                          mul_rn(mul_rn(as_float(words[i].w), rstd), high_half(scale[i].y)));
      *(U2*)&s.x[b][d] = pairs;
    }
  }
  sync_cta();
}
