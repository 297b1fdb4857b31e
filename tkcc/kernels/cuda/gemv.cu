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
  DEVICE void await(int, int) const {}
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
  DEVICE void await(int chunk, int lane) const { exchange.await_first(words + chunk * UNIT_COLS / 2, lane, where); }
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

// A lane's share of a unit: of each row two vectors of eight columns.
struct Rows {
  U4 half[2][UNIT_ROWS];

  // Takes the next unit off the ring. A stage takes its first one before it has its input: the sooner a place in the
  // ring is free, the longer memory stays busy.
  DEVICE void take(Stream& stream) {
    const U4* unit = stream.wait() + stream.lane;
#pragma unroll
    for (int i = 0; i < 2 * UNIT_ROWS; ++i) half[i / UNIT_ROWS][i % UNIT_ROWS] = unit[i % UNIT_ROWS * 64 + i / UNIT_ROWS * 32];
    stream.release();
  }

  DEVICE void multiply(const Slice& slice, float (&sums)[SUMS]) const {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
      for (int r = 0; r < UNIT_ROWS; ++r) {
        const U4& v = half[e / 4][r];
        const u32 word = e % 4 == 0 ? v.x : e % 4 == 1 ? v.y : e % 4 == 2 ? v.z : v.w;
        const float low = low_half(word), high = high_half(word);
#pragma unroll
        for (int b = 0; b < B; ++b) {
          float& sum = sums[r * BP + b];
          sum = fma_exact(low, slice.low(b, e / 4, e % 4), sum);
          sum = fma_exact(high, slice.high(b, e / 4, e % 4), sum);
        }
      }
  }
};

// part[(chunk * groups + group) * SUMS + row * BP + b] = sum over the chunk's 512 columns. `rows` holds the first unit,
// if there is one.
template <class Input>
DEVICE void multiply(Stream& stream, const Span& span, Rows& rows, float* part, const Input& input) {
  const int lane = stream.lane;
  int left = span.end - span.first, chunk = span.chunk;
  if (left == 0) return;
  input.await(chunk, lane);
  U4 ahead[B][2];
#pragma unroll
  for (int i = 0; i < 2 * B; ++i) ahead[i / 2][i % 2] = input.look(i / 2, chunk, i % 2, lane);
  float* to = part + span.first * SUMS + reduced_index<SUMS>(lane % SUMS);  // units of a run lie SUMS apart
  int in_chunk = min(left, span.groups - span.group);
  do {
    Slice slice;
#pragma unroll
    for (int i = 0; i < 2 * B; ++i) {
      input.finish(ahead[i / 2][i % 2], i / 2, chunk, i % 2, lane);
      slice.set(i / 2, i % 2, ahead[i / 2][i % 2]);
    }
    ++chunk;
    if (left > in_chunk) {
#pragma unroll
      for (int i = 0; i < 2 * B; ++i) ahead[i / 2][i % 2] = input.look(i / 2, chunk, i % 2, lane);
    }
#pragma unroll 1
    for (; in_chunk; --in_chunk) {
      float sums[SUMS];
      rows.multiply(slice, sums);
      if (--left) rows.take(stream);  // while the lanes are summed
      reduce_over_lanes<SUMS>(sums, lane);
      if (lane < SUMS) *to = sums[0];
      to += SUMS;
    }
    in_chunk = min(left, span.groups);
  } while (left);
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
      exchange.await_first(source + b * D + min(warp * 128, D - 4), lane, where);
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
