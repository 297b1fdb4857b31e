// One decode position against its cache. A CTA takes some blocks of one KV head for all its G query heads, so keys and
// values are read once; a warp takes some of these blocks. Partial results meet in shared memory, and, if a head is
// split over several CTAs, in all of them: each merges a part of the head's dims.

// What one warp prepares of the new position: a query head, or the key, or the value of the role's KV head.
struct InputJob {
  int row;     // of q|k|v, its first
  u16* to;     // in shared memory
  u16* cache;  // its place in layer 0's cache, for keys and values
  bool is_q, is_v;
};
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
      job.to[lane + 32 * i] = rounded;
      if (!job.is_q) cache[lane + 32 * i] = rounded;
    }
  }
}

// Scores of a block into scratch [BLOCK][N]. A pass looks at PER_PASS positions, LANES lanes to each, 8 dims a lane;
// while lanes are summed, partners trade heads, so that in the end each lane has one. Loops are kept short: code that
// runs once a layer is seldom in the nearest instruction cache, and its length is its latency.
template <int N>  // heads
DEVICE void block_scores(const U4* keys, const float (&q)[N][8], int lane, float* scratch) {
  constexpr int GP = N <= 1 ? 1 : N <= 2 ? 2 : N <= 4 ? 4 : 8;  // heads in that tree
  constexpr int LEVELS = LANES == 8 ? 3 : 4;
#pragma unroll 2
  for (int pass = 0; pass < 8; ++pass) {
    const U4 pairs = keys[pass * 32 + lane];
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    float dots[GP];
#pragma unroll
    for (int h = 0; h < GP; ++h) dots[h] = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float low = low_half(words[e]), high = high_half(words[e]);
#pragma unroll
      for (int h = 0; h < N; ++h) {
        dots[h] = fma_exact(low, q[h][2 * e], dots[h]);
        dots[h] = fma_exact(high, q[h][2 * e + 1], dots[h]);
      }
    }
    int head = 0, same = 0;  // which head this lane ends with; lane bits that do not choose it
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
      const int half = (GP >> level) / 2;
      const bool upper = (lane >> level) & 1;
      if (half == 0) {
        dots[0] = add_rn(dots[0], shuffle_xor(dots[0], 1 << level));
        same |= lane & (1 << level);
      } else {
#pragma unroll
        for (int h = 0; h < half; ++h) {
          float keep = upper ? dots[h + half] : dots[h];
          float send = upper ? dots[h] : dots[h + half];
          dots[h] = add_rn(keep, shuffle_xor(send, 1 << level));
        }
        head += upper ? half : 0;
      }
    }
    if (same == 0 && head < N) scratch[(pass * PER_PASS + lane / LANES) * N + head] = mul_rn(dots[0], SCORE_SCALE);
  }
}
constexpr float NO_SCORE = -3.0e38f;

DEVICE float max_over_warp(float value) {
  int bits = (int)as_bits(value);
  bits ^= (bits >> 31) & 0x7fffffff;  // now integers order as the floats did
  bits = warp_max(bits);
  return as_float((u32)(bits ^ ((bits >> 31) & 0x7fffffff)));
}

// How a CTA's warps divide its blocks: each has some of them, for all heads; or, if there are few, several warps share
// one, each for some of the heads, which cuts what a short context waits for.
struct Sharing {
  int warps;        // that share a block; a power of two
  int first_block, end_block, first_head;
  int owner;        // the warp whose stream has the block
};
DEVICE Sharing sharing_of(const Role& role, int warp) {
  const int blocks = role.last - role.first;
  Sharing sharing{1, role.first + share(blocks, warp), role.first + share(blocks, warp + 1), 0, warp};
  int warps = 1;
  while (blocks && 2 * warps * blocks <= NW && G % (2 * warps) == 0) warps *= 2;
  if (warps > 1) {
    const int block = warp / warps, there = block < blocks;
    sharing = Sharing{warps, role.first + block, role.first + block + there, warp % warps * (G / warps), warp};
    while (there && share(blocks, sharing.owner + 1) != block + 1) sharing.owner = (sharing.owner + 1) % NW;
    while (there && share(blocks, sharing.owner) != block) sharing.owner = (sharing.owner + 1) % NW;
  }
  return sharing;
}
// Whether a warp's partial result has head h.
DEVICE bool has_part(const Role& role, const Sharing& mine, int warp, int h) {
  const int blocks = role.last - role.first;
  if (mine.warps == 1) return share(blocks, warp) != share(blocks, warp + 1);
  return warp / mine.warps < blocks && h / (G / mine.warps) == warp % mine.warps;
}

// A warp's blocks, for N heads: an online softmax in base 2. Leaves o[HD], m, l for each head in shared.attend[warp].
// If the block is shared, `stream` is a copy of its owner's, who frees the ring slots later.
template <int N>
DEVICE void attend_blocks(Shared& s, Stream& stream, int warp, const Sharing& sharing, int past) {
  constexpr bool SHARED = N < G;
  const int lane = stream.lane, begin = sharing.first_block, end = sharing.end_block;
  float* scratch = s.attend[warp];
  float q[N][8], o[N * 8], m[N], l[N];
#pragma unroll
  for (int h = 0; h < N; ++h) {
    U4 pairs = *(const U4*)&s.q[sharing.first_head + h][(lane % LANES) * 8];
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) q[h][2 * e] = low_half(words[e]), q[h][2 * e + 1] = high_half(words[e]);
#pragma unroll
    for (int e = 0; e < 8; ++e) o[h * 8 + e] = 0.0f;
    m[h] = NO_SCORE;
    l[h] = 0.0f;
  }
  for (int block = begin; block < end; ++block) {
    const int live = past - block * BLOCK;  // positions of this block that exist, if fewer than BLOCK
    block_scores<N>(stream.wait(), q, lane, scratch);
    sync_warp();  // every lane sees the scores
    SHARED ? stream.skip() : stream.release();
    const bool is_live = lane < min(live, BLOCK);  // from here on a lane has one position of the block
    float p[N], top[N];
#pragma unroll
    for (int h = 0; h < N; ++h) p[h] = lane < BLOCK ? scratch[lane * N + h] : NO_SCORE;
    bool grows = false;
#pragma unroll
    for (int h = 0; h < N; ++h) {
      top[h] = fmaxf(m[h], max_over_warp(is_live ? p[h] : NO_SCORE));
      grows |= top[h] > m[h];
    }
    if (grows && block != begin) {  // the same in all lanes
#pragma unroll
      for (int h = 0; h < N; ++h) {
        float shrink = top[h] > m[h] ? exp2_exact(sub_rn(m[h], top[h])) : 1.0f;
        l[h] = mul_rn(l[h], shrink);
#pragma unroll
        for (int e = 0; e < 8; ++e) o[h * 8 + e] = mul_rn(o[h * 8 + e], shrink);
      }
    }
#pragma unroll
    for (int h = 0; h < N; ++h) {
      m[h] = top[h];
      // Rounded to bf16, so that its products with values are exact; the sum below takes the rounded one, too.
      p[h] = is_live ? round_bf16(exp2_exact(sub_rn(p[h], m[h]))) : 0.0f;
      l[h] = add_rn(l[h], p[h]);
      if (lane < BLOCK) scratch[lane * N + h] = p[h];
    }
    sync_warp();
    const U4* values = stream.wait();
#pragma unroll 2
    for (int pass = 0; pass < 8; ++pass) {
      const int position = pass * PER_PASS + lane / LANES;
      U4 pairs = values[pass * 32 + lane];
      // What lies past the end is not ours to multiply by, not even by zero: it may be a NaN.
      if (position >= live) pairs = U4{0, 0, 0, 0};
      const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
      float weight[N];
#pragma unroll
      for (int h = 0; h < N; ++h) weight[h] = scratch[position * N + h];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float low = low_half(words[e]), high = high_half(words[e]);
#pragma unroll
        for (int h = 0; h < N; ++h) {
          o[h * 8 + 2 * e] = fma_exact(low, weight[h], o[h * 8 + 2 * e]);
          o[h * 8 + 2 * e + 1] = fma_exact(high, weight[h], o[h * 8 + 2 * e + 1]);
        }
      }
    }
    SHARED ? stream.skip() : stream.release();
    sync_warp();  // every lane has read the probabilities
  }
  // Sum o over the lanes that had the same dims and other positions; each keeps a part of the (head, dim) pairs.
  int kept = N * 8, from = 0;
#pragma unroll
  for (int bit = LANES; bit < 32; bit *= 2) {
    const int half = bit == LANES ? N * 4 : N * 2;
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
  for (int i = 0; i < N * 4; ++i) {
    if (i >= kept) break;
    int pair = from + i;
    scratch[(sharing.first_head + pair / 8) * (HD + 2) + (lane % LANES) * 8 + pair % 8] = o[i];
  }
#pragma unroll
  for (int h = 0; h < N; ++h) {
    float sum = warp_sum(l[h]);
    float* ml = scratch + (sharing.first_head + h) * (HD + 2) + HD;
    if (lane == 0) ml[0] = m[h], ml[1] = sum;
  }
}

// The new position, not in the cache yet when the stream was queued: one more partial result, in slot NW.
DEVICE void attend_new(Shared& s, int warp, int lane) {
#pragma unroll 1
  for (int h = NW - 1 - warp; h < G; h += NW) {  // the last warps are those with fewer blocks
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < HD / 32; ++i) dot = fma_exact(from_bf16(s.q[h][lane + 32 * i]), from_bf16(s.k_new[lane + 32 * i]), dot);
    dot = warp_sum(dot);
    float* to = s.attend[NW] + h * (HD + 2);
#pragma unroll
    for (int i = 0; i < HD / 32; ++i) to[lane + 32 * i] = from_bf16(s.v_new[lane + 32 * i]);
    if (lane == 0) to[HD] = mul_rn(dot, SCORE_SCALE), to[HD + 1] = 1.0f;
  }
}

// Heads that a warp has no partial result for.
DEVICE void mark_missing(Shared& s, const Role& role, const Sharing& sharing, bool has_new, int warp, int lane) {
  if (lane < G && !has_part(role, sharing, warp, lane)) s.attend[warp][lane * (HD + 2) + HD] = NO_SCORE;
  if (warp == 0 && lane < G && !has_new) s.attend[NW][lane * (HD + 2) + HD] = NO_SCORE;
}
// What each partial result of this CTA (its warps', the new position's) weighs in their sum, for each head.
DEVICE void weigh_warps(Shared& s) {
  for (int i = threadIdx.x; i < (NW + 1) * G; i += NT) {
    const int mine = i / G, h = i % G;
    float top = NO_SCORE;
#pragma unroll
    for (int w = 0; w <= NW; ++w) top = fmaxf(top, s.attend[w][h * (HD + 2) + HD]);
    const float m = s.attend[mine][h * (HD + 2) + HD];
    s.weights[mine][h] = m > NO_SCORE ? exp2_exact(sub_rn(m, top)) : -1.0f;  // negative: not there
    if (mine == 0) s.top[h] = top;
  }
}

// Words of another CTA's partial result carry a tag, because not every CTA has a part in every step.
DEVICE void store_tagged(u64* word, u32 tag, float value) { store_relaxed64(word, (u64)tag << 32 | as_bits(value)); }
DEVICE bool has_tag(const U64x2& words, u32 tag) { return (u32)(words.x >> 32) == tag && (u32)(words.y >> 32) == tag; }

// Merges the partial results of all CTAs of this head, each of them a part of the head's dims: a warp for two dims, a
// lane for each slot, then the lanes' tree.
DEVICE void merge_ctas(const Params& p, const Shared& s, const Exchange& exchange, const Role& role, u32* out, int layer, u32 tag) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = role.slots;
  const u64* first = p.partials + ((long long)layer * gridDim.x + s.cta - role.slot) * PARTIAL_WORDS;
  constexpr int PAIRS = G * HD / 2;
  for (int pair = PAIRS * role.slot / n + warp; pair < PAIRS * (role.slot + 1) / n; pair += NW) {
    const int h = pair / (HD / 2), d = pair % (HD / 2) * 2;
    const u64* of_head = first + h * (HD + 2);
    float top = NO_SCORE;
    U64x2 ml, o;
    for (int slot = lane; slot < n; slot += 32) {  // usually once
      const u64* part = of_head + (long long)slot * PARTIAL_WORDS;
      ml = load_relaxed64x2(part + HD);
      o = load_relaxed64x2(part + d);
      u32 spins = 0;
      while (!has_tag(ml, tag) || !has_tag(o, tag)) {
        watchdog(spins, exchange.max_spins, exchange.report, 200 + layer);
        ml = load_relaxed64x2(part + HD);
        o = load_relaxed64x2(part + d);
      }
      top = fmaxf(top, as_float((u32)ml.x));
    }
    top = max_over_warp(top);
    float l = 0.0f, low = 0.0f, high = 0.0f;
    for (int slot = lane; slot < n; slot += 32) {
      if (n > 32) {  // more than one a lane: all are there now, so read them again
        const u64* part = of_head + (long long)slot * PARTIAL_WORDS;
        ml = load_relaxed64x2(part + HD);
        o = load_relaxed64x2(part + d);
      }
      const float weight = exp2_exact(sub_rn(as_float((u32)ml.x), top));
      l = add_rn(l, mul_rn(as_float((u32)ml.y), weight));
      low = add_rn(low, mul_rn(as_float((u32)o.x), weight));
      high = add_rn(high, mul_rn(as_float((u32)o.y), weight));
    }
    l = warp_sum(l);
    low = warp_sum(low);
    high = warp_sum(high);
    if (lane == 0) exchange.publish(out + pair, pack_bf16(div_rn(low, l), div_rn(high, l)));
  }
}

DEVICE void attention(const Params& p, Shared& s, Stream& stream, const Exchange& exchange, const Role& role,
                      const InputJob& job, const u32* raw, int layer, u32 tag) {
  if (role.b < 0) return;
  const bool has_new = role.slot == role.slots - 1;
  const int warp = stream.warp;
  const Sharing sharing = sharing_of(role, warp);
  if (sharing.warps > 1 && stream.lane == 0) s.next_slot[warp] = stream.slot, s.next_parity[warp] = stream.parity;
  mark_missing(s, role, sharing, has_new, warp, stream.lane);
  attention_inputs(p, s, exchange, role, job, raw, layer);
  sync_first(NT);
  MARK(4 * layer + 1, 2);
  if (sharing.first_block < sharing.end_block) {
    Stream of_owner = stream;
    if (sharing.warps > 1) {
      of_owner.warp = sharing.owner;
      of_owner.slot = s.next_slot[sharing.owner], of_owner.parity = s.next_parity[sharing.owner];
    }
    if (sharing.warps == 1) attend_blocks<G>(s, stream, warp, sharing, role.past);
    if (G % 2 == 0 && sharing.warps == 2) attend_blocks<ceil_div(G, 2)>(s, of_owner, warp, sharing, role.past);
    if (G % 4 == 0 && sharing.warps == 4) attend_blocks<ceil_div(G, 4)>(s, of_owner, warp, sharing, role.past);
  }
  if (has_new) attend_new(s, warp, stream.lane);
  sync_first(NT);
  MARK(4 * layer + 1, 3);
  weigh_warps(s);
  sync_first(NT);
  u32* out = exchange.at(layer, AT_ATTENTION) + (role.b * AW + role.kv_head * G * HD) / 2;
  u64* part = p.partials + ((long long)layer * gridDim.x + s.cta) * PARTIAL_WORDS;
  for (int i = threadIdx.x; i < G * HD; i += NT) {  // whole warps
    const int h = i / HD, d = i % HD;
    float o = 0.0f, l = 0.0f;
#pragma unroll
    for (int w = 0; w <= NW; ++w) {
      const float weight = s.weights[w][h], *partial = s.attend[w] + h * (HD + 2);
      if (weight >= 0.0f) {
        o = add_rn(o, mul_rn(partial[d], weight));
        l = add_rn(l, mul_rn(partial[HD + 1], weight));
      }
    }
    if (role.slots == 1) {
      const float mine = div_rn(o, l), next = shuffle_xor(mine, 1);
      if (d % 2 == 0) exchange.publish(out + i / 2, pack_bf16(mine, next));
    } else {
      store_tagged(part + h * (HD + 2) + d, tag, o);
      if (d < 2) store_tagged(part + h * (HD + 2) + HD + d, tag, d == 0 ? s.top[h] : l);
    }
  }
  if (sharing.warps > 1 && share(role.last - role.first, warp) != share(role.last - role.first, warp + 1))
    stream.release(), stream.release();  // its block's keys and values: the others have read them
  MARK(4 * layer + 1, 7);
  if (role.slots > 1) merge_ctas(p, s, exchange, role, out, layer, tag);
  if (has_new) fence_async_proxy();  // the cache's new row will be read by bulk copies in later steps
  // The scratch is used again in the next layer, many barriers from here.
}
