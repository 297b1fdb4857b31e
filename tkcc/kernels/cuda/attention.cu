// One decode position against its cache. A CTA takes some blocks of one KV head for all its G query heads, so keys and
// values are read once; a warp takes some of these blocks. Partial results of its warps meet in shared memory; those of
// several CTAs that share a head, in every CTA, as it reads the input of O: that costs reads, but no edge.

DEVICE InputJob input_job(const Params& p, Shared& s, const Role& role, int number) {
  InputJob job;
  job.is_q = number < G;
  job.is_v = number == G + 1;
  job.row = role.b * QKV + (job.is_q ? (role.kv_head * G + number) * HD : AW + (job.is_v ? K * HD : 0) + role.kv_head * HD);
  job.to = job.is_q ? s.q[number] : job.is_v ? s.v_new : s.k_new;
  const long long head = (long long)role.b * K + role.kv_head;
  job.cache = (job.is_v ? p.values : p.keys) + (head * p.kv_capacity + role.past) * HD;
  return job;
}

// Raw q, k, v of the new position: normed (Qwen3), rotated, rounded to bf16 into shared memory; k and v to the cache.
// `job` is the warp's first.
DEVICE void attention_inputs(const Params& p, Shared& s, const Exchange& exchange, const Role& role, InputJob job,
                             const u32* raw, int layer) {
  constexpr int OWN = HD / 32;  // a lane's dims: lane + 32 i, so both halves of each rotated pair are its own
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int jobs = role.slot == role.slots - 1 ? G + 2 : G;
#pragma unroll 1
  for (int number = warp; number < jobs; number += NW) {
    if (number != warp) job = input_job(p, s, role, number);
    const u32* words = raw + job.row + lane;
    float x[OWN];
    u32 first[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) first[i] = load_relaxed(words + 32 * i);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (first[i] == EMPTY) first[i] = exchange.poll(words + 32 * i, 600 + layer);
      x[i] = as_float(first[i]);
    }
    if (QK_NORM && !job.is_v) {
      const u16* norm = p.qk_norms + (2 * layer + (job.is_q ? 0 : 1)) * HD;
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < OWN; ++i) squares = add_rn(squares, mul_rn(x[i], x[i]));
      float rstd = div_rn(1.0f, sqrt_rn(add_rn(mean_of<HD>(warp_sum(squares)), EPS)));
#pragma unroll
      for (int i = 0; i < OWN; ++i) x[i] = mul_rn(mul_rn(x[i], rstd), from_bf16(norm[lane + 32 * i]));
    }
    if (!job.is_v) {
#pragma unroll
      for (int i = 0; i < OWN / 2; ++i) {
        float cosine = s.rope[role.b][lane + 32 * i], sine = s.rope[role.b][HD / 2 + lane + 32 * i];
        float a = x[i], b = x[i + OWN / 2];
        x[i] = sub_rn(mul_rn(a, cosine), mul_rn(b, sine));
        x[i + OWN / 2] = add_rn(mul_rn(b, cosine), mul_rn(a, sine));
      }
    }
    u16* cache = job.cache + (long long)layer * B * K * p.kv_capacity * HD;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      u16 rounded = to_bf16(x[i]);
      job.to[lane + 32 * i] = from_bf16(rounded);
      if (!job.is_q) cache[lane + 32 * i] = rounded;
    }
  }
}

// Scores of a block into scratch [BLOCK][G]. A pass looks at PER_PASS positions, LANES lanes to each, 8 dims a lane. Then
// the lanes are summed for all passes and heads at once: partners trade halves of what they have, so few shuffles wait.
DEVICE void block_scores(const U4* keys, const float (&q)[G][8], int lane, float* scratch) {
  constexpr int GP = G == 1 && LANES == 8 ? 1 : G <= 2 ? 2 : G <= 4 ? 4 : 8;  // heads in that tree
  constexpr int PASSES = 2, DOTS = PASSES * GP;  // passes whose lanes are summed at once
  constexpr int LEVELS = LANES == 8 ? 3 : 4, KEPT = DOTS >> LEVELS > 0 ? DOTS >> LEVELS : 1;
  const int same = DOTS >> LEVELS > 0 ? 0 : lane & ((1 << LEVELS) - DOTS) & ((1 << LEVELS) - 1);  // lanes that end with the same one: all but the first are silent
#pragma unroll 1
  for (int from = 0; from < 8; from += PASSES) {
    float dots[DOTS];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const U4 pairs = keys[(from + pass) * 32 + lane];
      const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
      for (int h = 0; h < GP; ++h) dots[pass * GP + h] = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float low = low_half(words[e]), high = high_half(words[e]);
#pragma unroll
        for (int h = 0; h < G; ++h) {
          dots[pass * GP + h] = fma_exact(low, q[h][2 * e], dots[pass * GP + h]);
          dots[pass * GP + h] = fma_exact(high, q[h][2 * e + 1], dots[pass * GP + h]);
        }
      }
    }
    reduce_over_lanes<DOTS, LEVELS>(dots, lane);
    const int index = reduced_index<DOTS, LEVELS>(lane);
    float* to = scratch + ((from + index / GP) * PER_PASS + lane / LANES) * G;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const int head = (index + i) % GP;
      if (same == 0 && head < G) to[i / GP * PER_PASS * G + head] = mul_rn(dots[i], SCORE_SCALE);
    }
  }
}
constexpr float NO_SCORE = -3.0e38f;

DEVICE float max_over_warp(float value) {
  int bits = (int)as_bits(value);
  bits ^= (bits >> 31) & 0x7fffffff;  // now integers order as the floats did
  bits = warp_max(bits);
  return as_float((u32)(bits ^ ((bits >> 31) & 0x7fffffff)));
}

// A warp's blocks: an online softmax in base 2. Leaves o[HD], m, l for each head in shared.attend[warp].
DEVICE void attend_blocks(Shared& s, Stream& stream, int begin, int end, int past) {
  const int lane = stream.lane;
  float* scratch = s.attend[stream.warp];
  float q[G][8], o[G * 8], m[G], l[G];
#pragma unroll
  for (int h = 0; h < G; ++h) {
#pragma unroll
    for (int e = 0; e < 8; ++e) q[h][e] = s.q[h][(lane % LANES) * 8 + e];
#pragma unroll
    for (int e = 0; e < 8; ++e) o[h * 8 + e] = 0.0f;
    m[h] = NO_SCORE;
    l[h] = 0.0f;
  }
#pragma unroll 1
  for (int block = begin; block < end; ++block) {
    const int live = past - block * BLOCK;  // positions of this block that exist, if fewer than BLOCK
    block_scores(stream.wait(), q, lane, scratch);
    sync_warp();  // every lane sees the scores
    stream.release();
    const bool is_live = lane < min(live, BLOCK);  // from here on a lane has one position of the block
    float p[G], top[G];
#pragma unroll
    for (int h = 0; h < G; ++h) p[h] = lane < BLOCK ? scratch[lane * G + h] : NO_SCORE;
    bool grows = false;
#pragma unroll
    for (int h = 0; h < G; ++h) {
      top[h] = fmaxf(m[h], max_over_warp(is_live ? p[h] : NO_SCORE));
      grows |= top[h] > m[h];
    }
    if (grows && block != begin) {  // the same in all lanes
#pragma unroll
      for (int h = 0; h < G; ++h) {
        float shrink = top[h] > m[h] ? exp2_exact(sub_rn(m[h], top[h])) : 1.0f;
        l[h] = mul_rn(l[h], shrink);
#pragma unroll
        for (int e = 0; e < 8; ++e) o[h * 8 + e] = mul_rn(o[h * 8 + e], shrink);
      }
    }
#pragma unroll
    for (int h = 0; h < G; ++h) {
      m[h] = top[h];
      // Rounded to bf16, so that its products with values are exact; the sum below takes the rounded one, too.
      p[h] = is_live ? round_bf16(exp2_exact(sub_rn(p[h], m[h]))) : 0.0f;
      l[h] = add_rn(l[h], p[h]);
      if (lane < BLOCK) scratch[lane * G + h] = p[h];
    }
    sync_warp();
    const U4* values = stream.wait();
#pragma unroll 4
    for (int pass = 0; pass < 8; ++pass) {
      const int position = pass * PER_PASS + lane / LANES;
      U4 pairs = values[pass * 32 + lane];
      // What lies past the end is not ours to multiply by, not even by zero: it may be a NaN.
      if (position >= live) pairs = U4{0, 0, 0, 0};
      const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
      float weight[G];
#pragma unroll
      for (int h = 0; h < G; ++h) weight[h] = scratch[position * G + h];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float low = low_half(words[e]), high = high_half(words[e]);
#pragma unroll
        for (int h = 0; h < G; ++h) {
          o[h * 8 + 2 * e] = fma_exact(low, weight[h], o[h * 8 + 2 * e]);
          o[h * 8 + 2 * e + 1] = fma_exact(high, weight[h], o[h * 8 + 2 * e + 1]);
        }
      }
    }
    stream.release();  // also: every lane has read the probabilities
  }
  // Sum o over the lanes that had the same dims and other positions; each keeps a part of the (head, dim) pairs.
  int kept = G * 8, from = 0;
#pragma unroll
  for (int bit = LANES; bit < 32; bit *= 2) {
    const int half = bit == LANES ? G * 4 : G * 2;
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      float keep = upper ? o[i + half] : o[i];
      float send = upper ? o[i] : o[i + half];
      o[i] = add_rn(keep, shuffle_xor(send, bit));
    }
    from += upper ? half : 0;
    kept = half;
  }
#pragma unroll
  for (int i = 0; i < G * 4; ++i) {
    if (i >= kept) break;
    int pair = from + i;
    scratch[pair / 8 * (HD + 2) + (lane % LANES) * 8 + pair % 8] = o[i];
  }
  constexpr int GP = G <= 1 ? 1 : G <= 2 ? 2 : G <= 4 ? 4 : 8;
  float sums[GP];
#pragma unroll
  for (int h = 0; h < GP; ++h) sums[h] = h < G ? l[h] : 0.0f;
  reduce_over_lanes<GP>(sums, lane);
  const int head = reduced_index<GP>(lane % GP);
  if (lane < GP && head < G) scratch[head * (HD + 2) + HD + 1] = sums[0];
#pragma unroll
  for (int h = 0; h < G; ++h)
    if (lane == 0) scratch[h * (HD + 2) + HD] = m[h];
}

// The new position, not in the cache yet when the stream was queued: one more partial result, in slot NW.
DEVICE void attend_new(Shared& s, int warp, int lane) {
#pragma unroll 1
  for (int h = NW - 1 - warp; h < G; h += NW) {  // the last warps are those with fewer blocks
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < HD / 32; ++i) dot = fma_exact(s.q[h][lane + 32 * i], s.k_new[lane + 32 * i], dot);
    dot = warp_sum(dot);
    float* to = s.attend[NW] + h * (HD + 2);
#pragma unroll
    for (int i = 0; i < HD / 32; ++i) to[lane + 32 * i] = s.v_new[lane + 32 * i];
    if (lane == 0) to[HD] = mul_rn(dot, SCORE_SCALE), to[HD + 1] = 1.0f;
  }
}

// Merges this CTA's partial results (its warps', the new position's) and publishes them in its slot. A warp has dims of
// one head; a lane works out what one of the partial results weighs.
DEVICE void publish_attended(Shared& s, const Exchange& exchange, const Role& role, u32* slots) {
  static_assert(NW < 32, "a lane for each partial result");
  const int lane = threadIdx.x % 32;
  u32* out = slots + role.slot * SLOT_WORDS;
#pragma unroll 1
  for (int i = threadIdx.x; i < G * HD; i += NT) {  // whole warps
    const int h = i / HD, d = i % HD;
    const float* mine = s.attend[min(lane, NW)] + h * (HD + 2);
    const float m = lane <= NW ? mine[HD] : NO_SCORE, top = max_over_warp(m);
    const bool there = m > NO_SCORE;
    const float weight = there ? exp2_exact(sub_rn(m, top)) : 0.0f, weighed_l = there ? mul_rn(mine[HD + 1], weight) : 0.0f;
    const u32 all_there = warp_ballot(there);
    float o = 0.0f, l = 0.0f;
#pragma unroll
    for (int w = 0; w <= NW; ++w) {
      const float partial = all_there >> w & 1 ? s.attend[w][h * (HD + 2) + d] : 0.0f;
      o = add_rn(o, mul_rn(partial, shuffle_from(weight, w)));
      l = add_rn(l, shuffle_from(weighed_l, w));
    }
    const float attended = div_rn(o, l), next = shuffle_xor(attended, 1);
    if (d % 2 == 0) exchange.publish(out + i / 2, pack_bf16(attended, next));
    if (d < 2) exchange.publish(out + G * HD / 2 + 2 * h + d, as_bits(d == 0 ? top : l));
  }
  // Slots that have no CTA in this step must be empty in the next one, if they have one then.
  constexpr int VECTORS = SLOT_WORDS / 4;
  const int unused = (MAX_SLOTS - 1 - role.slot) / role.slots;  // slots role.slot + role.slots, + 2 role.slots, ...
#pragma unroll 1
  for (int i = threadIdx.x; i < unused * VECTORS; i += NT)
    exchange.empty4(slots + (role.slot + (1 + i / VECTORS) * role.slots) * SLOT_WORDS + i % VECTORS * 4);
}

DEVICE void attention(const Params& p, Shared& s, Stream& stream, const Exchange& exchange, const Role& role,
                      const u32* raw, int layer) {
  if (role.b < 0) return;
  const bool has_new = role.slot == role.slots - 1;
  const int warp = stream.warp, lane = stream.lane, blocks = role.last - role.first;
  const int begin = role.first + share(blocks, warp), end = role.first + share(blocks, warp + 1);
  if (lane < G) {  // a score that says: nothing here
    if (begin == end) s.attend[warp][lane * (HD + 2) + HD] = NO_SCORE;
    if (warp == 0 && !has_new) s.attend[NW][lane * (HD + 2) + HD] = NO_SCORE;
  }
  attention_inputs(p, s, exchange, role, s.jobs[warp], raw, layer);
  TRACE(9);
  sync_first(NT);
  TRACE(10);
  if (begin < end) attend_blocks(s, stream, begin, end, role.past);
  if (has_new) attend_new(s, warp, lane);
  TRACE(11);
  sync_first(NT);
  TRACE(12);
  publish_attended(s, exchange, role, exchange.at(layer, AT_ATTENTION) + (role.b * K + role.kv_head) * MAX_SLOTS * SLOT_WORDS);
  TRACE(14);
  // The scratch is used again in the next layer, many barriers from here.
}

// The input of O into shared.x: for each 8 dims of a head, what its CTAs attended to, by how much each of them weighs.
// LANES lanes share a head, and each works out the weights of some of its slots. Ends with a barrier.
DEVICE void gather_attended(Shared& s, const Exchange& exchange, const u32* slots, int where) {
  constexpr int PER_LANE = MAX_SLOTS / LANES, AT_ONCE = 4;
  const int lane = threadIdx.x % 32, in_head = lane % LANES;
#pragma unroll
  for (int b = 0; b < B; ++b) {
    const int n = s.slots[b];
#pragma unroll 1
    for (int column = threadIdx.x * 8; column < line_up(AW / 8) * 8; column += NT * 8) {  // whole warps
      const bool there = column < AW;
      const int head = there ? column / HD : 0, kv_head = head / G, h = head % G;
      const u32* of_head = slots + (b * K + kv_head) * MAX_SLOTS * SLOT_WORDS;
      const u32 *outs = of_head + (there ? column % (G * HD) / 2 : 0), *stats = of_head + G * HD / 2 + 2 * h;
      exchange.await_first(outs, lane, where);
      U4 seen[AT_ONCE], ahead[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (i < n) ahead[i] = load_relaxed4(outs + i * SLOT_WORDS);
      float m[PER_LANE], weight[PER_LANE], top = NO_SCORE, total = 0.0f;
      U2 ml[PER_LANE];
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (in_head + i * LANES < n) ml[i] = load_relaxed2(stats + (in_head + i * LANES) * SLOT_WORDS);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        m[i] = NO_SCORE;
        if (in_head + i * LANES < n) exchange.finish2(ml[i], stats + (in_head + i * LANES) * SLOT_WORDS, where), m[i] = as_float(ml[i].x);
        top = fmaxf(top, m[i]);
      }
#pragma unroll
      for (int mask = 1; mask < LANES; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        weight[i] = in_head + i * LANES < n ? mul_rn(exp2_exact(sub_rn(m[i], top)), as_float(ml[i].y)) : 0.0f;
        total = i ? add_rn(total, weight[i]) : weight[0];
      }
#pragma unroll
      for (int mask = 1; mask < LANES; mask *= 2) total = add_rn(total, shuffle_xor(total, mask));
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) weight[i] = div_rn(weight[i], total);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = 0.0f;
#pragma unroll 1
      for (int from = 0; from < n; from += AT_ONCE) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          seen[i] = ahead[i];
          if (from + AT_ONCE + i < n) ahead[i] = load_relaxed4(outs + (from + AT_ONCE + i) * SLOT_WORDS);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int slot = from + i;
          if (slot >= n) break;
          const float by = shuffle_from(slot < LANES ? weight[0] : weight[PER_LANE - 1], lane - in_head + slot % LANES);
          exchange.finish4(seen[i], outs + slot * SLOT_WORDS, where);
          const u32 words[4] = {seen[i].x, seen[i].y, seen[i].z, seen[i].w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x[2 * e] = add_rn(x[2 * e], mul_rn(low_half(words[e]), by));
            x[2 * e + 1] = add_rn(x[2 * e + 1], mul_rn(high_half(words[e]), by));
          }
        }
      }
      if (there) *(U4*)&s.x[b][column] = U4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
    }
  }
  sync_first(NT);
}
