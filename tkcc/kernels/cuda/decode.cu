// The decode step as one persistent kernel: one CTA on each multiprocessor, all of them through all stages of all
// layers and, if asked, of several steps that depend on each other. See docs/kernels.md for the design.

DEVICE int sequence_of(int i, int rows) { return B == 1 ? 0 : i / rows; }

DEVICE Part part_of(const Params& p, int kind, int cta, int warp) {
  const u32 work = p.work[kind * gridDim.x + cta];
  return Part{(int)(work & 0xffff), (int)(work >> 16), span_of((int)(work >> 16), chunks_of(kind), warp)};
}

// What the rows of O and down are added to: another stage's words, or, if null, the embeddings of the step's tokens.
// Everyone has used these words already, so they are there.
DEVICE float residual_of(const Params& p, const Shared& s, const u32* residual, int first_row, int rows, int i) {
  int b = sequence_of(i, rows), d = first_row + i - b * rows;
  return residual ? as_float(load_relaxed(residual + b * D + d)) : from_bf16(p.embed[(long long)s.token[b] * D + d]);
}

// The rows of one pass over a stage's row groups, whose chunk sums all warps of this CTA have left in shared memory.
struct Pass {
  const float* sums;
  int groups, first_row, rows;
};

// QKV, O and down, published as floats: QKV divided by its norm, the others added to the residual in whole floats.
template <int KIND>
DEVICE void publish_rows(const Params& p, const Shared& s, const Exchange& exchange, const Pass& pass, const u32* residual, float early,
                         u32* out) {
  constexpr int WIDTH = KIND == QKV_STAGE ? QKV : D;
#pragma unroll 1
  for (int i = threadIdx.x; i < pass.rows * B; i += NT) {
    const int b = sequence_of(i, pass.rows), row = i - b * pass.rows;
    float sum = row_sum<chunks_of(KIND)>(pass.sums, pass.groups, row, b);
    if (KIND == QKV_STAGE) sum = mul_rn(sum, s.rstd[b]);
    else sum = add_rn(i == threadIdx.x ? early : residual_of(p, s, residual, pass.first_row, pass.rows, i), sum);
    exchange.publish(out + b * WIDTH + pass.first_row + row, as_bits(sum));
  }
}

// silu(gate) * up. A group has two rows of each, and so a quad of lanes one word.
DEVICE void publish_hidden(const Shared& s, const Exchange& exchange, const Pass& pass, u32* out) {
#pragma unroll 1
  for (int i = threadIdx.x; i < line_up(pass.rows * B); i += NT) {  // whole warps
    const int b = sequence_of(i, pass.rows), row = i - b * pass.rows;
    const bool there = i < pass.rows * B;
    const float sum = there ? mul_rn(row_sum<ND>(pass.sums, pass.groups, row, b), s.rstd[b]) : 0.0f, other = shuffle_xor(sum, 2);
    const float gate = i & 2 ? other : sum, up = i & 2 ? sum : other;
    const float silu = div_rn(gate, add_rn(1.0f, exp2_exact(mul_rn(gate, -0x1.7154760000000p+0f))));
    const float hidden = mul_rn(silu, up), next = shuffle_xor(hidden, 1);
    if (i % 4 == 0 && there) exchange.publish(out + b * (F / 2) + (pass.first_row + row) / 4, pack_bf16(hidden, next));
  }
}

// Larger logit first, then the lower token: an order on 64-bit words.
DEVICE u64 rank_of(float logit, u32 token) {
  u32 bits = as_bits(logit);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)bits << 32 | (0xffffffffu - token);
}
DEVICE void rank_logits(const Shared& s, const Pass& pass, float* logits, u64 (&best)[B]) {
#pragma unroll 1
  for (int row = threadIdx.x; row < pass.rows; row += NT) {
    const int token = pass.first_row + row;
    if (token >= V) continue;  // padding of the last group
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const float logit = mul_rn(row_sum<ND>(pass.sums, pass.groups, row, b), s.rstd[b]);
      if (logits) logits[(long long)b * V + token] = logit;
      const u64 rank = rank_of(logit, token);
      best[b] = rank > best[b] ? rank : best[b];
    }
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
  fence_async_proxy();  // the cache's new rows will be read by bulk copies
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

// Brings the words that this CTA will write next into L2: a line that is not there when a few of its words are written
// comes from memory before anyone can read them, behind all the weights that are on their way.
DEVICE void touch_outputs(const Exchange& exchange, const Part* parts, const Role& role, int layer, const u32* words) {
  const u32* next = layer + 1 < L ? words + LAYER_WORDS : exchange.now + exchange.other;  // QKV and O come in the next layer
  const int tid = threadIdx.x;
  if (tid < 8) {
    const int kind = tid / 2, per_group = kind == GATE_UP_STAGE ? 1 : UNIT_ROWS;
    const u32* at = kind == QKV_STAGE ? next + AT_QKV : kind == O_STAGE ? next + AT_MID : kind == GATE_UP_STAGE ? words + AT_HIDDEN : words + AT_OUT;
    prefetch_l2_to_stay(at + parts[kind].first_group * per_group + (tid & 1 ? parts[kind].groups * per_group - 1 : 0));
  } else if (tid < 8 + SLOT_WORDS / 32 && role.b >= 0) {
    prefetch_l2_to_stay(next + AT_ATTENTION + ((role.b * K + role.kv_head) * MAX_SLOTS + role.slot) * SLOT_WORDS + (tid - 8) * 32);
  }
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
                            p.max_spins, p.report};
    if (tid == 0) {
      s.role[step & 1] = attention_role(s.position, cta, gridDim.x, p.min_blocks, s.slots);
      barrier_arrive(&s.role_known);
    }
    sync_first(NT);
    const Role& role = s.role[step & 1];
    for (int i = tid; i < B * HD; i += NT) s.rope[i / HD][i % HD] = p.rope[(long long)s.position[i / HD] * HD + i % HD];

    if (lane == 0) s.jobs[warp] = input_job(p, s, role, warp);
    sync_warp();
    const u16* norm = p.norms;       // the next one to be applied
    const u32* residual = nullptr;   // what O and down are added to; null: the embeddings
    u32* words = exchange.now;       // of the layer
    float* logits = step + 1 == p.num_steps ? p.logits : nullptr;
    u64 best[B];
#pragma unroll
    for (int b = 0; b < B; ++b) best[b] = 0;

    // One body for all stages: code that runs once a layer and is long does not stay in the instruction cache.
    int layer = 0, kind = QKV_STAGE;
#pragma unroll 1
    while (true) {
      TRACE_STAGE(4 * layer + kind % 4);
      TRACE(0);
      if (kind == O_STAGE) attention(p, s, stream, exchange, role, words + AT_QKV, layer);
      TRACE(1);
      const Part& part = parts[kind];
      Span span = part.span;
      Rows rows{};  // or the compiler keeps the last stage's
      if (span.first < span.end) rows.take(stream);  // before the input is there: the sooner memory has room to load into
      TRACE(7);
      if (kind == GATE_UP_STAGE) touch_outputs(exchange, parts, role, layer, words);
      Input input{s, exchange, nullptr, 100 * (kind + 1) + layer};
      if (kind == O_STAGE) {
        gather_attended(s, exchange, words + AT_ATTENTION, input.where);
      } else if (kind == DOWN_STAGE) {
        input.hidden = words + AT_HIDDEN;
      } else {
        normalise(p, s, stream, exchange, residual, norm, input);
        norm += D;
        if (cta == 0 && tid < ceil_div(2 * D, 64)) prefetch_l2(norm + tid * 64 < p.norms + (2 * L + 1) * D ? norm + tid * 64 : p.norms);
      }
      const int chunks = chunks_of(kind), per_pass = groups_per_pass(chunks), groups = part.groups;
#pragma unroll 1
      for (int done = 0; done < groups; done += per_pass) {
        const Pass pass{s.part[buffer ^= 1], span.groups, (part.first_group + done) * UNIT_ROWS, span.groups * UNIT_ROWS};
        const bool adds = kind == O_STAGE || kind == DOWN_STAGE;
        float early = 0.0f;  // this thread's residual, read off the critical path
        if (adds && tid < pass.rows * B) early = residual_of(p, s, residual, pass.first_row, pass.rows, tid);
        multiply(stream, span, rows, s.part[buffer], input);
        if (warp == 0 && !adds) find_rstd(s, lane);  // this warp has the fewest units
        TRACE(4);
        TRACE_SUM(3, stream.waited);
        sync_first(NT);
        TRACE(5);
        switch (kind) {
          case QKV_STAGE: publish_rows<QKV_STAGE>(p, s, exchange, pass, residual, early, words + AT_QKV); break;
          case O_STAGE: publish_rows<O_STAGE>(p, s, exchange, pass, residual, early, words + AT_MID); break;
          case GATE_UP_STAGE: publish_hidden(s, exchange, pass, words + AT_HIDDEN); break;
          case DOWN_STAGE: publish_rows<DOWN_STAGE>(p, s, exchange, pass, residual, early, words + AT_OUT); break;
          default: rank_logits(s, pass, logits, best);
        }
        if (done + per_pass < groups) {  // more row groups than shared memory has sums for
          span = span_of(groups - done - per_pass, chunks, warp);
          if (span.first < span.end) rows.take(stream);
        }
      }
      TRACE(6);
      if (kind == HEAD_STAGE) break;
      if (kind == O_STAGE) residual = words + AT_MID;
      if (kind != DOWN_STAGE) {
        ++kind;
        continue;
      }
      residual = words + AT_OUT;
      words += LAYER_WORDS;
      kind = ++layer == L ? HEAD_STAGE : QKV_STAGE;
    }

    // No lane may fall two steps behind: it could not tell the phases of role_known apart.
    if (lane == 0 && !barrier_wait(&s.role_read[warp], step & 1, p.max_spins)) stuck(p.report, 450);
    end_step(p, s, best, step, tag);
  }

  if (cta == 0) {
    if (tid < B) p.tokens[tid] = s.token[tid], p.positions[tid] = s.position[tid];
    if (tid == 0) p.counters[32] = steps_done + p.num_steps;
  }
}

#ifdef TKCC_TRACE
// How long a read that hits L2 takes, all along the launch: clock << 16 | cycles, the last 4096 of them in a ring.
__device__ void probe_l2(const Params& p, Shared& s) {
  long long* to = p.trace + TRACE_PROBES + (long long)s.cta * 4096;
  for (int i = 0; !*(volatile int*)&s.trace_stop; i = (i + 1) % 4096) {
    const long long start = clock64();
    u32 word = 0;
    for (int hop = 0; hop < 8; ++hop) word = load_relaxed(p.counters + 32 + (word >> 31));  // each waits for the last one
    const long long end = clock64() + (word >> 31);
    to[i] = start << 16 | min(end - start, 65535ll);
    asm volatile("nanosleep.u32 100;");
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_steps(const __grid_constant__ Params p) {
  SHARED_MEMORY(Shared, s);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int cta = p.cta_is_multiprocessor ? multiprocessor() : (int)blockIdx.x;

  for (int i = tid; i < 2 * L * NW; i += THREADS) s.run_parts[i / NW][i % NW] = p.run_parts[cta * 2 * L * NW + i];
  for (int i = tid; i < B * ND * UNIT_COLS; i += THREADS) (&s.x[0][0])[i] = 0;  // columns past D stay zero
  if (lane == 0 && warp < NW) {
    for (int kind = 0; kind < 5; ++kind) s.parts[warp][kind] = part_of(p, kind, cta, warp);
  }
  if (tid < B) s.token[tid] = p.tokens[tid], s.position[tid] = p.positions[tid];
  if (warp < NW && lane < SLOTS) barrier_init(&s.full[warp][lane]), barrier_init(&s.empty[warp][lane]);
  const u32 steps_done = p.counters[32];
#ifdef TKCC_TRACE
  s.trace_stop = 0;
#endif
  if (warp < NW && lane == 0) barrier_init(&s.role_read[warp]);
  if (tid == 0) barrier_init(&s.role_known), s.cta = cta;
  barrier_init_done();
  sync_all();

  if (warp < NW) {
    take_registers<NW == 8 ? 224 : NW == 16 ? 104 : 152>();
    compute_steps(p, s, steps_done);
#ifdef TKCC_TRACE
    s.trace_stop = 1;
#endif
  } else {  // a whole warpgroup, because registers are traded by warpgroup; its other warps have nothing to do
    give_registers<56>();
    if (warp == NW) load_streams(p, s, lane);
#ifdef TKCC_TRACE
    if (warp == NW + 1 && lane == 0) probe_l2(p, s);
#endif
  }
}
