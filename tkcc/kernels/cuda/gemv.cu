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

DEVICE int groups_per_pass(int chunks) { return PART_FLOATS / (chunks * SUMS); }
DEVICE Span span_of(int groups, int chunks, int warp) {
  groups = min(groups, groups_per_pass(chunks));
  Span span{groups, share(groups * chunks, warp), share(groups * chunks, warp + 1), 0, 0};
  if (span.first < span.end) span.chunk = span.first / groups, span.group = span.first - span.chunk * groups;
  return span;
}

// What a stage multiplies its rows by: shared.x, or, if `hidden` is not null, the output of gate and up in global memory,
// [B][F / 2] bf16 pairs, there sooner or later.
struct Input {
  Shared& s;
  const Exchange& exchange;
  const u32* hidden;
  int where;

  DEVICE void await(int chunk, int lane) const {
    if (hidden) exchange.await_first(hidden + chunk * UNIT_COLS / 2, lane, where);
  }
  DEVICE U4 look(int b, int chunk, int half, int lane) const {
    const int column = chunk * UNIT_COLS + half * 256 + lane * 8;
    if (!hidden) return *(const U4*)&s.x[b][column];
    return F % UNIT_COLS && column >= F ? U4{0, 0, 0, 0} : load_relaxed4(hidden + (b * F + column) / 2);
  }
  DEVICE void finish(U4& seen, int b, int chunk, int half, int lane) const {
    const int column = chunk * UNIT_COLS + half * 256 + lane * 8;
    if (hidden && !(F % UNIT_COLS && column >= F)) exchange.finish4(seen, hidden + (b * F + column) / 2, where);
  }
};

// A lane's share of a unit: of each row two vectors of eight columns.
struct Rows {
  U4 half[2][UNIT_ROWS];

  DEVICE void load(const U4* unit, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * UNIT_ROWS; ++i)
      half[i / UNIT_ROWS][i % UNIT_ROWS] = unit[i % UNIT_ROWS * 64 + i / UNIT_ROWS * 32 + lane];
  }
  DEVICE void take(Stream& stream) {
    load(stream.wait(), stream.lane);
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
// if there is one. There is one copy of this for all stages: instructions that run once a layer come from far.
DEVICE void multiply(Stream& stream, const Span& span, Rows& rows, float* part, const Input& input) {
  const int lane = stream.lane;
  int left = span.end - span.first, chunk = span.chunk;
  if (left == 0) return;
  input.await(chunk, lane);
  U4 ahead[B][2];
#pragma unroll
  for (int i = 0; i < 2 * B; ++i) ahead[i / 2][i % 2] = input.look(i / 2, chunk, i % 2, lane);
  float* to = part + span.first * SUMS;  // units of a run lie SUMS apart
  int in_chunk = 0, next_count = min(left, span.groups - span.group);
  Slice slice;
  const auto one_unit = [&](float (&sums)[SUMS]) {
    if (in_chunk == 0) {  // on to the next slice of the input
      in_chunk = next_count;
#pragma unroll
      for (int i = 0; i < 2 * B; ++i) {
        input.finish(ahead[i / 2][i % 2], i / 2, chunk, i % 2, lane);
        slice.set(i / 2, i % 2, ahead[i / 2][i % 2]);
      }
      if (left == span.end - span.first) TRACE(2);
      ++chunk;
      next_count = min(left - in_chunk, span.groups);
      if (next_count) {
#pragma unroll
        for (int i = 0; i < 2 * B; ++i) ahead[i / 2][i % 2] = input.look(i / 2, chunk, i % 2, lane);
      }
    }
    rows.multiply(slice, sums);
    --in_chunk, --left;
    if (left) rows.load(stream.wait(), lane);  // on its way while the lanes are summed
  };
#pragma unroll 1
  while (true) {
    float sums[SUMS];
    one_unit(sums);
    if (TOGETHER == 1 || left == 0) {
      reduce_over_lanes<SUMS>(sums, lane);
      if (lane < SUMS) to[reduced_index<SUMS>(lane)] = sums[0];
      to += SUMS;
    } else {  // the lanes of two units are summed at once: shuffles have a long way
      stream.release();
      float more[SUMS], both[2 * SUMS];
      one_unit(more);
#pragma unroll
      for (int i = 0; i < SUMS; ++i) both[i] = sums[i], both[SUMS + i] = more[i];
      reduce_over_lanes<2 * SUMS>(both, lane);
      if (lane < 2 * SUMS) to[reduced_index<2 * SUMS>(lane)] = both[0];
      to += 2 * SUMS;
    }
    if (left == 0) break;
    stream.release();
  }
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

// The residual times the norm's weights into shared.x as bf16, and each warp's sum of squares into shared.square_sums.
// The norm's divisor is applied to the products, by when it is long known: `find_rstd`.
// `source`: [B][D] float words of another stage, or, if null, the embeddings of this step's tokens. Ends with a barrier.
DEVICE void normalise(const Params& p, Shared& s, Stream& stream, const Exchange& exchange, const u32* source, const u16* norm, const Input& input) {
  constexpr int ROUNDS = ceil_div(D, NT * 4);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  U2 scale[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int d = (i * NT + tid) * 4;
    if (d < D) scale[i] = *(const U2*)(norm + d);
  }
#pragma unroll
  for (int b = 0; b < B; ++b) {
    U4 words[ROUNDS];
    if (source) {
      exchange.await_first(source + b * D + min(warp * 128, D - 4), lane, input.where);
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        int d = (i * NT + tid) * 4;
        if (d < D) words[i] = load_relaxed4(source + b * D + d);
      }
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        int d = (i * NT + tid) * 4;
        if (d < D) exchange.finish4(words[i], source + b * D + d, input.where);
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
    TRACE(8);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if ((i * NT + tid) * 4 >= D) continue;
      const float r[4] = {as_float(words[i].x), as_float(words[i].y), as_float(words[i].z), as_float(words[i].w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) squares = add_rn(squares, mul_rn(r[e], r[e]));
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      int d = (i * NT + tid) * 4;
      if (d >= D) continue;
      U2 pairs;
      pairs.x = pack_bf16(mul_rn(as_float(words[i].x), low_half(scale[i].x)), mul_rn(as_float(words[i].y), high_half(scale[i].x)));
      pairs.y = pack_bf16(mul_rn(as_float(words[i].z), low_half(scale[i].y)), mul_rn(as_float(words[i].w), high_half(scale[i].y)));
      *(U2*)&s.x[b][d] = pairs;
    }
    squares = warp_sum(squares);
    if (lane == 0) s.square_sums[b][warp] = squares;
  }
  sync_first(NT);
}
// One warp, between the barrier that ends `normalise` and the next one: what the products are to be multiplied by.
DEVICE void find_rstd(Shared& s, int lane) {
  if (lane >= B) return;
  float total = s.square_sums[lane][0];
#pragma unroll
  for (int w = 1; w < NW; ++w) total = add_rn(total, s.square_sums[lane][w]);
  s.rstd[lane] = div_rn(1.0f, sqrt_rn(add_rn(mean_of<D>(total), EPS)));
}
