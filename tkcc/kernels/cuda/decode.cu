// The decode step as one persistent kernel: one CTA on each multiprocessor, all of them through all stages of all
// layers and, if asked, of several steps that depend on each other. See docs/kernels.md for the design.

DEVICE void publish_qkv(const Exchange& exchange, const float* part, int first_row, int groups, u32* out) {
  const int rows = groups * UNIT_ROWS;
  for (int i = threadIdx.x; i < rows * B; i += NT) {
    int b = i / rows, row = i - b * rows;
    exchange.publish(out + b * QKV + first_row + row, as_bits(row_sum(part, groups, ND, row, b)));
  }
}

// What the rows of O and down are added to: another stage's words, or, if null, the embeddings of the step's tokens.
// Everyone has used these words already, so they are there.
DEVICE float residual_of(const Params& p, const Shared& s, const u32* residual, int first_row, int rows, int i) {
  int b = i / rows, d = first_row + i - b * rows;
  return residual ? as_float(load_relaxed(residual + b * D + d)) : from_bf16(p.embed[(long long)s.token[b] * D + d]);
}

// O and down: the residual is added in whole floats. `early` is this thread's first one, read before the products.
DEVICE void publish_sum(const Params& p, const Shared& s, const Exchange& exchange, const float* part, int first_row,
                        int groups, int chunks, const u32* residual, float early, u32* out) {
  const int rows = groups * UNIT_ROWS;
  for (int i = threadIdx.x; i < rows * B; i += NT) {
    int b = i / rows, row = i - b * rows;
    float before = i == (int)threadIdx.x ? early : residual_of(p, s, residual, first_row, rows, i);
    exchange.publish(out + b * D + first_row + row, as_bits(add_rn(before, row_sum(part, groups, chunks, row, b))));
  }
}

// silu(gate) * up, two rows of each in a group.
DEVICE void publish_hidden(const Exchange& exchange, const float* part, int first_group, int groups, u32* out) {
  for (int i = threadIdx.x; i < groups * B; i += NT) {
    int b = i / groups, group = i - b * groups;
    float hidden[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float gate = row_sum(part, groups, ND, group * 4 + j, b), up = row_sum(part, groups, ND, group * 4 + 2 + j, b);
      float silu = div_rn(gate, add_rn(1.0f, exp2_exact(mul_rn(gate, -0x1.7154760000000p+0f))));
      hidden[j] = mul_rn(silu, up);
    }
    exchange.publish(out + b * (F / 2) + first_group + group, pack_bf16(hidden[0], hidden[1]));
  }
}

// Larger logit first, then the lower token: an order on 64-bit words.
DEVICE u64 rank_of(float logit, u32 token) {
  u32 bits = as_bits(logit);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)bits << 32 | (0xffffffffu - token);
}
DEVICE void rank_logits(const Params& p, const float* part, int first_row, int groups, float* logits, u64 (&best)[B]) {
  for (int row = threadIdx.x; row < groups * UNIT_ROWS; row += NT) {
    const int token = first_row + row;
    if (token >= V) continue;  // padding of the last group
#pragma unroll
    for (int b = 0; b < B; ++b) {
      float logit = row_sum(part, groups, ND, row, b);
      if (logits) logits[(long long)b * V + token] = logit;
      u64 rank = rank_of(logit, token);
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
#pragma unroll
  for (int b = 0; b < B; ++b) {
    u64 of_warp = warp_best(best[b]);
    if (lane == 0) s.best[warp][b] = of_warp;
  }
  sync_cta();
  u64* all = p.best + (u64)(tag & 1) * gridDim.x * B;
  if (tid < B) {
    u64 top = s.best[0][tid];
    for (int w = 1; w < NW; ++w) top = s.best[w][tid] > top ? s.best[w][tid] : top;
    store_relaxed64(all + blockIdx.x * B + tid, top);
  }
  sync_cta();
  if (tid == 0) {
    const u32 target = tag * gridDim.x;  // arrivals up to this step; the counter is never reset, and may wrap
    add_release(p.counters, 1);
    u32 spins = 0;
    while ((int)(load_acquire(p.counters) - target) < 0) watchdog(spins, p.max_spins, p.report, 400);
  }
  sync_cta();
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
      if (blockIdx.x == 0) p.out_tokens[step * B + b] = token;
    }
  }
  sync_cta();
}

extern "C" __global__ void __launch_bounds__(NT, 1) decode_steps(const __grid_constant__ Params p) {
  SHARED_MEMORY(Shared, s);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, cta = blockIdx.x, grid = gridDim.x;

  for (int i = tid; i < 4 * L + 1; i += NT) s.work[i] = p.work[i * grid + cta];
  for (int i = tid; i < B * ND * UNIT_COLS; i += NT) (&s.x[0][0])[i] = 0;  // columns past D stay zero
  if (tid < B) s.token[tid] = p.tokens[tid], s.position[tid] = p.positions[tid];
  if (lane < SLOTS) barrier_init(&s.full[warp][lane]);
  barrier_init_done();
  const u32 steps_done = p.counters[32];
  if (tid == 0) s.role_step = -1;
  sync_cta();

  Stream stream;
  stream.start(p, s, warp, lane);
  int buffer = 0;  // which half of s.part the next pass writes: the other one may still be read

  for (int step = 0; step < p.num_steps; ++step) {
    const u32 parity = (steps_done + step) & 1, tag = steps_done + step + 1;
    Exchange exchange{p.exchange + parity * PARITY_WORDS, parity ? -(long long)PARITY_WORDS : (long long)PARITY_WORDS,
                      p.max_spins, p.back_off_ns, p.report};
    if (tid == 0) s.role = attention_role(s.position, cta, grid, p.min_blocks), s.role_step = step;
    sync_cta();
    stream.pump();
    for (int i = tid; i < B * HD; i += NT) s.rope[i / HD][i % HD] = p.rope[(long long)s.position[i / HD] * HD + i % HD];

    u64 best[B];
#pragma unroll
    for (int b = 0; b < B; ++b) best[b] = 0;

    // One loop for all products, so that the instructions of a layer fit the cache.
    for (int index = 0; index <= 4 * L; ++index) {
      const int layer = index / 4, order = index % 4;
      const int kind = index == 4 * L ? STAGE_HEAD : order == 0 ? STAGE_QKV : order + 1;
      const u32* before = layer ? exchange.at(layer - 1, AT_OUT) : nullptr;  // null: the embeddings
      u32* mid = exchange.at(layer, AT_MID);
      const int where = layer * 10 + kind, chunks = chunks_of(kind), per_pass = groups_per_pass(chunks);
      Input input{&s, &exchange, nullptr, 0, where};
      const u32* residual = nullptr;
      if (kind == STAGE_O) {
        attention(p, s, stream, exchange, layer, tag);
        input.polled = exchange.at(layer, AT_ATTENTION), input.columns = AW;
        residual = before;
      } else if (kind == STAGE_DOWN) {
        input.polled = exchange.at(layer, AT_HIDDEN), input.columns = F;
        residual = mid;
      } else {
        const u16* norm = p.norms + (2ll * layer + (kind == STAGE_GATE_UP)) * D;
        if (cta == 0 && kind != STAGE_HEAD && tid < ceil_div(D, 64)) prefetch_l2(norm + D + tid * 64);  // the next norm
        normalise(p, s, exchange, kind == STAGE_GATE_UP ? mid : before, norm, where);
      }
      const int all = s.work[index] >> 16, first_group = s.work[index] & 0xffff;
      for (int done = 0; done < all; done += per_pass) {
        const int groups = min(per_pass, all - done), first_row = (first_group + done) * UNIT_ROWS;
        const int rows = groups * UNIT_ROWS;
        const bool adds = kind == STAGE_O || kind == STAGE_DOWN;
        float early = adds && tid < rows * B ? residual_of(p, s, residual, first_row, rows, tid) : 0.0f;
        float* part = s.part[buffer ^= 1];
        multiply_units(stream, groups, chunks, part, input);
        sync_cta();
        if (kind == STAGE_QKV) {
          publish_qkv(exchange, part, first_row, groups, exchange.at(layer, AT_QKV));
        } else if (adds) {
          u32* out = kind == STAGE_O ? mid : exchange.at(layer, AT_OUT);
          publish_sum(p, s, exchange, part, first_row, groups, chunks, residual, early, out);
        } else if (kind == STAGE_GATE_UP) {
          publish_hidden(exchange, part, first_group + done, groups, exchange.at(layer, AT_HIDDEN));
        } else {
          rank_logits(p, part, first_row, groups, step + 1 == p.num_steps ? p.logits : nullptr, best);
        }
      }
    }
    end_step(p, s, best, step, tag);
  }

  if (cta == 0) {
    if (tid < B) p.tokens[tid] = s.token[tid], p.positions[tid] = s.position[tid];
    if (tid == 0) p.counters[32] = steps_done + p.num_steps;
  }
}
