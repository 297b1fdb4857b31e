// The decode step as one persistent kernel: one CTA on each multiprocessor, all of them through all stages of all
// layers and, if asked, of several steps that depend on each other. See docs/kernels.md for the design.

DEVICE int sequence_of(int i, int rows) { return B == 1 ? 0 : i / rows; }

template <int KIND>
DEVICE Part part_of(const Params& p, int cta, int warp) {
  const u32 work = p.work[KIND * gridDim.x + cta];
  return Part{(int)(work & 0xffff), (int)(work >> 16), span_of<chunks_of(KIND)>((int)(work >> 16), warp)};
}

// Stages with more row groups than shared memory has sums for take several passes.
template <int CHUNKS>
DEVICE void next_pass(Stream& stream, Span& span, Rows& rows, int groups) {
  if (groups <= 0) return;
  span = span_of<CHUNKS>(groups, stream.warp);
  if (span.first < span.end) rows.take(stream);
}
DEVICE void take_first(Stream& stream, const Part& part, Rows& rows) {
  if (part.span.first < part.span.end) rows.take(stream);
}

// What the rows of O and down are added to: another stage's words, or, if null, the embeddings of the step's tokens.
// Everyone has used these words already, so they are there.
DEVICE float residual_of(const Params& p, const Shared& s, const u32* residual, int first_row, int rows, int i) {
  int b = sequence_of(i, rows), d = first_row + i - b * rows;
  return residual ? as_float(load_relaxed(residual + b * D + d)) : from_bf16(p.embed[(long long)s.token[b] * D + d]);
}

// QKV, O and down: products, the residual added in whole floats (if ADDS), published as floats.
template <int KIND, class Input>
DEVICE void project(const Params& p, Shared& s, Stream& stream, const Exchange& exchange, const Part& part, Rows& rows, int& buffer,
                    const Input& input, const u32* residual, u32* out, int mark) {
  constexpr int CHUNKS = chunks_of(KIND), WIDTH = KIND == QKV_STAGE ? QKV : D;
  constexpr bool ADDS = KIND != QKV_STAGE;
  Span span = part.span;
  for (int done = 0; done < part.groups; done += groups_per_pass(CHUNKS)) {
    const int first_row = (part.first_group + done) * UNIT_ROWS, num_rows = span.groups * UNIT_ROWS, tid = threadIdx.x;
    float early = 0.0f;  // this thread's residual, read off the critical path
    if (ADDS && tid < num_rows * B) early = residual_of(p, s, residual, first_row, num_rows, tid);
    float* sums = s.part[buffer ^= 1];
    multiply(stream, span, rows, sums, input);
    MARK(mark, 4);
    sync_first(NT);
    MARK(mark, 5);
#pragma unroll 1
    for (int i = tid; i < num_rows * B; i += NT) {
      int b = sequence_of(i, num_rows), row = i - b * num_rows;
      float sum = row_sum<CHUNKS>(sums, span.groups, row, b);
      if (ADDS) sum = add_rn(i == tid ? early : residual_of(p, s, residual, first_row, num_rows, i), sum);
      exchange.publish(out + b * WIDTH + first_row + row, as_bits(sum));
    }
    next_pass<CHUNKS>(stream, span, rows, part.groups - done - groups_per_pass(CHUNKS));
  }
}

// silu(gate) * up. A group has two rows of each, and so a quad of lanes one word.
template <class Input>
DEVICE void gate_and_up(Shared& s, Stream& stream, const Exchange& exchange, const Params& p, const Part& part, Rows& rows, int& buffer,
                        const Input& input, u32* out, int mark) {
  Span span = part.span;
  for (int done = 0; done < part.groups; done += groups_per_pass(ND)) {
    const int num_rows = span.groups * UNIT_ROWS;
    float* sums = s.part[buffer ^= 1];
    multiply(stream, span, rows, sums, input);
    MARK(mark, 4);
    sync_first(NT);
    MARK(mark, 5);
#pragma unroll 1
    for (int i = threadIdx.x; i < line_up(num_rows * B); i += NT) {  // whole warps
      const int b = sequence_of(i, num_rows), row = i - b * num_rows;
      const float sum = i < num_rows * B ? row_sum<ND>(sums, span.groups, row, b) : 0.0f, other = shuffle_xor(sum, 2);
      const float gate = i & 2 ? other : sum, up = i & 2 ? sum : other;
      const float silu = div_rn(gate, add_rn(1.0f, exp2_exact(mul_rn(gate, -0x1.7154760000000p+0f))));
      const float hidden = mul_rn(silu, up), next = shuffle_xor(hidden, 1);
      u32* word = out + b * (F / 2) + part.first_group + done + row / 4;
      if (i % 4 == 0 && i < num_rows * B) exchange.publish(word, pack_bf16(hidden, next));
    }
    next_pass<ND>(stream, span, rows, part.groups - done - groups_per_pass(ND));
  }
}

// Larger logit first, then the lower token: an order on 64-bit words.
DEVICE u64 rank_of(float logit, u32 token) {
  u32 bits = as_bits(logit);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)bits << 32 | (0xffffffffu - token);
}
template <class Input>
DEVICE void head(const Params& p, Shared& s, Stream& stream, const Part& part, Rows& rows, int& buffer, const Input& input, float* logits,
                 u64 (&best)[B]) {
  Span span = part.span;
  for (int done = 0; done < part.groups; done += groups_per_pass(ND)) {
    float* sums = s.part[buffer ^= 1];
    multiply(stream, span, rows, sums, input);
    sync_first(NT);
#pragma unroll 1
    for (int row = threadIdx.x; row < span.groups * UNIT_ROWS; row += NT) {
      const int token = (part.first_group + done) * UNIT_ROWS + row;
      if (token >= V) continue;  // padding of the last group
#pragma unroll
      for (int b = 0; b < B; ++b) {
        float logit = row_sum<ND>(sums, span.groups, row, b);
        if (logits) logits[(long long)b * V + token] = logit;
        u64 rank = rank_of(logit, token);
        best[b] = rank > best[b] ? rank : best[b];
      }
    }
    next_pass<ND>(stream, span, rows, part.groups - done - groups_per_pass(ND));
  }
}
DEVICE u64 warp_best(u64 best) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    u64 other = shuffle_xor64(best, mask);
    best = other > best ? other : best;
  }
  return best;
}

// All CTAs have their candidates; picks the same tokens in each, and orders all that a step wrote before the next.
DEVICE void end_step(const Params& p, Shared& s, u64 (&best)[B], int step, u32 tag) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
#pragma unroll
  for (int b = 0; b < B; ++b) {
    u64 of_warp = warp_best(best[b]);
    if (lane == 0) s.best[warp][b] = of_warp;
  }
  sync_first(NT);
  u64* all = p.best + (u64)(tag & 1) * gridDim.x * B;
  if (tid < B) {
    u64 top = s.best[0][tid];
    for (int w = 1; w < NW; ++w) top = s.best[w][tid] > top ? s.best[w][tid] : top;
    store_relaxed64(all + s.cta * B + tid, top);
  }
  sync_first(NT);
  if (tid == 0) {
    const u32 target = tag * gridDim.x;  // arrivals up to this step; the counter is never reset, and may wrap
    add_release(p.counters, 1);
    u32 spins = 0;
    while ((int)(load_acquire(p.counters) - target) < 0) watchdog(spins, p.max_spins, p.report, 400);
  }
  sync_first(NT);
  fence_async_proxy();
  for (int b = warp; b < B; b += NW) {
    u64 top = 0;
    for (int i = lane; i < (int)gridDim.x; i += 32) {
      u64 of_cta = load_relaxed64(all + i * B + b);
      top = of_cta > top ? of_cta : top;
    }
    top = warp_best(top);
    if (lane == 0) {
      int token = (int)(0xffffffffu - (u32)top);
      s.token[b] = token;
      s.position[b] += 1;
      if (s.cta == 0) p.out_tokens[step * B + b] = token;
    }
  }
  sync_first(NT);
}

// Everything but loading: all stages of all layers, for each step.
DEVICE void compute_steps(const Params& p, Shared& s, u32 steps_done) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, cta = s.cta;
  Stream stream{&s, warp, lane, 0, 0, p.max_spins, p.report};
  int buffer = 0;  // which half of s.part the next pass writes: the other one may still be read
  const Part* parts = s.parts[warp];

  for (int step = 0; step < p.num_steps; ++step) {
    const u32 parity = (steps_done + step) & 1, tag = steps_done + step + 1;
    const Exchange exchange{p.exchange + parity * PARITY_WORDS, parity ? -(long long)PARITY_WORDS : (long long)PARITY_WORDS,
                            p.max_spins, p.back_off_ns, p.report};
    if (tid == 0) {
      s.role[step & 1] = attention_role(s.position, cta, gridDim.x, p.min_blocks);
      set_flag(&s.role_step, step);
    }
    sync_first(NT);
    const Role role = s.role[step & 1];
    for (int i = tid; i < B * HD; i += NT) s.rope[i / HD][i % HD] = p.rope[(long long)s.position[i / HD] * HD + i % HD];

    const InputJob job = input_job(p, s, role, warp);
    const u16* norm = p.norms;
    const u32* before = nullptr;  // what the layer starts from; null: the embeddings
    u32* words = exchange.now;
    const NormalisedInput normalised{s};
    for (int layer = 0; layer < L; ++layer, norm += 2 * D, words += LAYER_WORDS) {
      if (cta == 0 && tid < ceil_div(2 * D, 64)) prefetch_l2(norm + D + tid * 64);  // the two norms after this one
      Rows rows;
      MARK(4 * layer, 0);
      take_first(stream, parts[QKV_STAGE], rows);
      normalise<true>(p, s, exchange, before, norm, 100 + layer);
      MARK(4 * layer, 1);
      project<QKV_STAGE>(p, s, stream, exchange, parts[QKV_STAGE], rows, buffer, normalised, nullptr, words + AT_QKV, 4 * layer);
      MARK(4 * layer, 6);

      MARK(4 * layer + 1, 0);
      attention(p, s, stream, exchange, role, job, words + AT_QKV, layer, tag);
      MARK(4 * layer + 1, 1);
      take_first(stream, parts[O_STAGE], rows);
      const PolledInput<AW> attended{exchange, words + AT_ATTENTION, 200 + layer};
      project<O_STAGE>(p, s, stream, exchange, parts[O_STAGE], rows, buffer, attended, before, words + AT_MID, 4 * layer + 1);
      MARK(4 * layer + 1, 6);

      MARK(4 * layer + 2, 0);
      take_first(stream, parts[GATE_UP_STAGE], rows);
      normalise<false>(p, s, exchange, words + AT_MID, norm + D, 300 + layer);
      MARK(4 * layer + 2, 1);
      gate_and_up(s, stream, exchange, p, parts[GATE_UP_STAGE], rows, buffer, normalised, words + AT_HIDDEN, 4 * layer + 2);
      MARK(4 * layer + 2, 6);

      MARK(4 * layer + 3, 0);
      MARK(4 * layer + 3, 1);
      take_first(stream, parts[DOWN_STAGE], rows);
      const PolledInput<F> hidden{exchange, words + AT_HIDDEN, 400 + layer};
      project<DOWN_STAGE>(p, s, stream, exchange, parts[DOWN_STAGE], rows, buffer, hidden, words + AT_MID, words + AT_OUT, 4 * layer + 3);
      MARK(4 * layer + 3, 6);
      before = words + AT_OUT;
    }

    u64 best[B];
#pragma unroll
    for (int b = 0; b < B; ++b) best[b] = 0;
    Rows rows;
    MARK(4 * L, 0);
    take_first(stream, parts[HEAD_STAGE], rows);
    normalise<false>(p, s, exchange, before, norm, 500);
    MARK(4 * L, 1);
    head(p, s, stream, parts[HEAD_STAGE], rows, buffer, normalised, step + 1 == p.num_steps ? p.logits : nullptr, best);
    MARK(4 * L, 6);
    end_step(p, s, best, step, tag);
  }

  if (cta == 0) {
    if (tid < B) p.tokens[tid] = s.token[tid], p.positions[tid] = s.position[tid];
    if (tid == 0) p.counters[32] = steps_done + p.num_steps;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_steps(const __grid_constant__ Params p) {
  SHARED_MEMORY(Shared, s);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int cta = p.cta_is_multiprocessor ? multiprocessor() : (int)blockIdx.x;

  for (int i = tid; i < 2 * L * NW; i += THREADS) s.run_parts[i / NW][i % NW] = p.run_parts[cta * 2 * L * NW + i];
  for (int i = tid; i < B * ND * UNIT_COLS; i += THREADS) (&s.x[0][0])[i] = 0;  // columns past D stay zero
  if (lane == 0 && warp < NW) {
    s.parts[warp][QKV_STAGE] = part_of<QKV_STAGE>(p, cta, warp);
    s.parts[warp][O_STAGE] = part_of<O_STAGE>(p, cta, warp);
    s.parts[warp][GATE_UP_STAGE] = part_of<GATE_UP_STAGE>(p, cta, warp);
    s.parts[warp][DOWN_STAGE] = part_of<DOWN_STAGE>(p, cta, warp);
    s.parts[warp][HEAD_STAGE] = part_of<HEAD_STAGE>(p, cta, warp);
  }
  if (tid < B) s.token[tid] = p.tokens[tid], s.position[tid] = p.positions[tid];
  if (warp < NW && lane < SLOTS) barrier_init(&s.full[warp][lane]), barrier_init(&s.empty[warp][lane]);
  barrier_init_done();
  const u32 steps_done = p.counters[32];
  if (tid == 0) s.role_step = -1, s.cta = cta;
  sync_all();

  if (warp < NW) {
    take_registers<NW == 8 ? 224 : NW == 16 ? 112 : 152>();
    compute_steps(p, s, steps_done);
  } else {  // a whole warpgroup, because registers are traded by warpgroup; its other warps have nothing to do
    give_registers<56>();
    if (warp == NW) load_streams(p, s, lane);
  }
}
