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

DEVICE constexpr int groups_per_pass(int chunks) { return PART_FLOATS / (chunks * SUMS); }

// A warp's units of one pass over some row groups: chunk by chunk, so that it seldom changes its slice of x.
struct Span {
  int groups, first, end;  // units [first, end) of groups * chunks
  int chunk, group;        // of the first one
};
template <int CHUNKS>
DEVICE Span span_of(int groups, int warp) {
  groups = min(groups, groups_per_pass(CHUNKS));
  Span span{groups, share(groups * CHUNKS, warp), share(groups * CHUNKS, warp + 1), 0, 0};
  if (span.first < span.end) span.chunk = span.first / groups, span.group = span.first - span.chunk * groups;
  return span;
}

// A slice of the normalised input, in shared memory.
struct NormalisedInput {
  const Shared& shared;
  DEVICE U4 look(int b, int chunk, int half, int lane) const {
    return *(const U4*)&shared.x[b][chunk * UNIT_COLS + half * 256 + lane * 8];
  }
  DEVICE void finish(U4&, int, int, int, int) const {}
};
// A slice of another stage's output in global memory: bf16 pairs, [B][COLUMNS / 2], there sooner or later.
template <int COLUMNS>
struct PolledInput {
  const Exchange& exchange;
  const u32* words;
  int where;
  DEVICE U4 look(int b, int chunk, int half, int lane) const {
    const int column = chunk * UNIT_COLS + half * 256 + lane * 8;
    if (COLUMNS % UNIT_COLS && column >= COLUMNS) return U4{0, 0, 0, 0};
    return load_relaxed4(words + (b * COLUMNS + column) / 2);
  }
  DEVICE void finish(U4& seen, int b, int chunk, int half, int lane) const {
    const int column = chunk * UNIT_COLS + half * 256 + lane * 8;
    if (COLUMNS % UNIT_COLS && column >= COLUMNS) return;
    exchange.finish4(seen, words + (b * COLUMNS + column) / 2, where);
  }
};

// One step of reduce_over_lanes: a level of the tree.
template <int N, int LEVEL>
DEVICE void reduce_level(float (&values)[N], int lane) {
  constexpr int half = (N >> LEVEL) / 2;
  const bool upper = (lane >> LEVEL) & 1;
  if (half == 0) values[0] = add_rn(values[0], shuffle_xor(values[0], 1 << LEVEL));
#pragma unroll
  for (int i = 0; i < half; ++i) {
    float keep = upper ? values[i + half] : values[i];
    float send = upper ? values[i] : values[i + half];
    values[i] = add_rn(keep, shuffle_xor(send, 1 << LEVEL));
  }
}

constexpr int AT_ONCE = B <= 2 ? 2 : 1;  // units multiplied together; more of them would not fit the registers

// Adds a quarter (two of eight columns of each lane's vectors) of the units' products.
template <int HALF, int QUARTER>
DEVICE void add_products(const U4 (&rows)[AT_ONCE][UNIT_ROWS], const Slice& slice, float (&sums)[AT_ONCE * SUMS]) {
#pragma unroll
  for (int unit = 0; unit < AT_ONCE; ++unit)
#pragma unroll
    for (int r = 0; r < UNIT_ROWS; ++r) {
      const U4& v = rows[unit][r];
      const u32 word = QUARTER == 0 ? v.x : QUARTER == 1 ? v.y : QUARTER == 2 ? v.z : v.w;
      const float low = low_half(word), high = high_half(word);
#pragma unroll
      for (int b = 0; b < B; ++b) {
        float& sum = sums[unit * SUMS + r * BP + b];
        sum = fma_exact(low, slice.low(b, HALF, QUARTER), sum);
        sum = fma_exact(high, slice.high(b, HALF, QUARTER), sum);
      }
    }
}

// part[(chunk * groups + group) * SUMS + row * BP + b] = sum over the chunk's 512 columns. While some units' products
// fill the pipeline, the lanes of those before them are summed.
template <int CHUNKS, class Input>
DEVICE void multiply(Stream& stream, const Span& span, float* part, const Input& input) {
  constexpr int N = AT_ONCE * SUMS;
  const int lane = stream.lane;
  const int index = reduced_index<N>(lane % N), to = index % SUMS, second = index / SUMS;
  int u = span.first, chunk = span.chunk, group = span.group;
  if (u == span.end) return;
  U4 ahead[B][2];
#pragma unroll
  for (int i = 0; i < 2 * B; ++i) ahead[i / 2][i % 2] = input.look(i / 2, chunk, i % 2, lane);
  float last[N];
  float* last_to = nullptr;  // where the units before go; null in lanes that have no sum of theirs
#pragma unroll
  for (int i = 0; i < N; ++i) last[i] = 0.0f;
  do {
    Slice slice;
#pragma unroll
    for (int i = 0; i < 2 * B; ++i) {
      input.finish(ahead[i / 2][i % 2], i / 2, chunk, i % 2, lane);
      slice.set(i / 2, i % 2, ahead[i / 2][i % 2]);
    }
    const int stop = min(span.end, (chunk + 1) * span.groups);
    if (stop < span.end) {
#pragma unroll
      for (int i = 0; i < 2 * B; ++i) ahead[i / 2][i % 2] = input.look(i / 2, chunk + 1, i % 2, lane);
    }
    while (u < stop) {
      const bool two = AT_ONCE == 2 && u + 1 < stop;
      const U4* first_unit = stream.wait();
      const U4* second_unit = two ? stream.wait_next() : first_unit;  // if there is none: products for nothing
      float sums[N];
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] = 0.0f;
      U4 rows[AT_ONCE][UNIT_ROWS];
#pragma unroll
      for (int r = 0; r < AT_ONCE * UNIT_ROWS; ++r)
        rows[r / UNIT_ROWS][r % UNIT_ROWS] = (r < UNIT_ROWS ? first_unit : second_unit)[r % UNIT_ROWS * 64 + lane];
      add_products<0, 0>(rows, slice, sums);
      reduce_level<N, 0>(last, lane);
      add_products<0, 1>(rows, slice, sums);
      reduce_level<N, 1>(last, lane);
      add_products<0, 2>(rows, slice, sums);
      reduce_level<N, 2>(last, lane);
      add_products<0, 3>(rows, slice, sums);
#pragma unroll
      for (int r = 0; r < AT_ONCE * UNIT_ROWS; ++r)
        rows[r / UNIT_ROWS][r % UNIT_ROWS] = (r < UNIT_ROWS ? first_unit : second_unit)[r % UNIT_ROWS * 64 + 32 + lane];
      reduce_level<N, 3>(last, lane);
      add_products<1, 0>(rows, slice, sums);
      reduce_level<N, 4>(last, lane);
      add_products<1, 1>(rows, slice, sums);
      if (last_to) *last_to = last[0];
      add_products<1, 2>(rows, slice, sums);
      add_products<1, 3>(rows, slice, sums);
      stream.release(two ? 2 : 1);
#pragma unroll
      for (int i = 0; i < N; ++i) last[i] = sums[i];
      last_to = lane < N && (two || !second) ? part + (chunk * span.groups + group + second) * SUMS + to : nullptr;
      u += AT_ONCE;
      group += AT_ONCE;
    }
    u = stop;
    group = 0;
    ++chunk;
  } while (u < span.end);
  reduce_over_lanes<N>(last, lane);
  if (last_to) *last_to = last[0];
}

// The whole row's sum: chunks in ascending order. `row` counts within the pass's groups.
template <int CHUNKS>
DEVICE float row_sum(const float* part, int groups, int row, int b) {
  const float* at = part + row * BP + b;
  float sum = at[0];
#pragma unroll
  for (int c = 1; c < CHUNKS; ++c) sum = add_rn(sum, at[c * groups * SUMS]);
  return sum;
}

// RMS norm of the residual into shared.x as bf16. `source`: [B][D] float words of another stage, or, if null, the
// embeddings of this step's tokens. Ends with a barrier.
template <bool MAY_EMBED>
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
    if (!MAY_EMBED || source) {
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
    if (b) sync_first(NT);  // the last sequence's sums have been read
    if (lane == 0) s.square_sums[warp] = squares;
    sync_first(NT);
    float total = s.square_sums[0];
    for (int w = 1; w < NW; ++w) total = add_rn(total, s.square_sums[w]);
    float rstd = div_rn(1.0f, sqrt_rn(add_rn(mean_of<D>(total), EPS)));
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
  sync_first(NT);
}
