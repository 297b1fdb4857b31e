// One decode position against its cache. A CTA takes some blocks of one KV head for all its G query heads, so keys and
// values are read once; a warp takes some of these blocks. Partial results meet in shared memory, and, if a head is
// split over several CTAs, in the CTA that has the head's last slot.

// Raw q, k, v of the new position: normed (Qwen3), rotated, rounded to bf16 into shared memory; k and v to the cache.
DEVICE void attention_inputs(const Params& p, Shared& s, const Exchange& exchange, const Role& role, int layer) {
  constexpr int OWN = HD / 32;  // a lane's dims: lane + 32 i, so both halves of each rotated pair are its own
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool has_new = role.slot == role.slots - 1;
  const u32* raw = exchange.at(layer, AT_QKV) + role.b * QKV;
  for (int job = warp; job < (has_new ? G + 2 : G); job += NW) {
    const bool is_q = job < G, is_v = job == G + 1;
    int row = is_q ? (role.kv_head * G + job) * HD : AW + (is_v ? K * HD : 0) + role.kv_head * HD;
    float x[OWN];
    u32 first[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) first[i] = load_relaxed(raw + row + lane + 32 * i);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (first[i] == EMPTY) first[i] = exchange.poll(raw + row + lane + 32 * i, 100 + layer);
      x[i] = as_float(first[i]);
    }
    if (QK_NORM && !is_v) {
      const u16* norm = p.qk_norms + (2 * layer + (is_q ? 0 : 1)) * HD;
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < OWN; ++i) squares = add_rn(squares, mul_rn(x[i], x[i]));
      float rstd = div_rn(1.0f, sqrt_rn(add_rn(div_rn(warp_sum(squares), (float)HD), EPS)));
#pragma unroll
      for (int i = 0; i < OWN; ++i) x[i] = mul_rn(mul_rn(x[i], rstd), from_bf16(norm[lane + 32 * i]));
    }
    if (!is_v) {
      float turned[OWN];
#pragma unroll
      for (int i = 0; i < OWN / 2; ++i) {
        float cosine = s.rope[role.b][lane + 32 * i], sine = s.rope[role.b][HD / 2 + lane + 32 * i];
        float a = x[i], b = x[i + OWN / 2];
        turned[i] = sub_rn(mul_rn(a, cosine), mul_rn(b, sine));
        turned[i + OWN / 2] = add_rn(mul_rn(b, cosine), mul_rn(a, sine));
      }
#pragma unroll
      for (int i = 0; i < OWN; ++i) x[i] = turned[i];
    }
    u16* to = is_q ? s.q[job] : is_v ? s.v_new : s.k_new;
    long long head = (long long)(layer * B + role.b) * K + role.kv_head;
    u16* cache = (is_v ? p.values : p.keys) + (head * p.kv_capacity + role.past) * HD;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      u16 rounded = to_bf16(x[i]);
      to[lane + 32 * i] = rounded;
      if (!is_q) cache[lane + 32 * i] = rounded;
    }
  }
}

// A lane's part of one block, for G heads: 8 dims of 8 positions, as 8 passes over the unit.
DEVICE void add_products(const U4& keys, const float (&q)[G][8], float (&dots)[G]) {
  const u32 words[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
  for (int h = 0; h < G; ++h) dots[h] = 0.0f;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float low = low_half(words[e]), high = high_half(words[e]);
#pragma unroll
    for (int h = 0; h < G; ++h) {
      dots[h] = fma_exact(low, q[h][2 * e], dots[h]);
      dots[h] = fma_exact(high, q[h][2 * e + 1], dots[h]);
    }
  }
}
// Two passes' dots: lanes with `bit` set keep b's, the others a's, each with its partner's share added.
DEVICE void trade(float (&a)[G], const float (&b)[G], int lane, int bit) {
  const bool upper = lane & bit;
#pragma unroll
  for (int h = 0; h < G; ++h) a[h] = add_rn(upper ? b[h] : a[h], shuffle_xor(upper ? a[h] : b[h], bit));
}

// Scores of a block. Lane l gets those of pass l % 8, i.e. of position block_position(l); with HD = 128 lanes l and
// l ^ 8 get the same one.
DEVICE void block_scores(const U4* keys, const float (&q)[G][8], int lane, float (&scores)[G]) {
  float level2[G];
#pragma unroll
  for (int four = 0; four < 2; ++four) {
    float level1[G];
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      float a[G], b[G];
      add_products(keys[(four * 4 + two * 2) * 32 + lane], q, a);
      add_products(keys[(four * 4 + two * 2 + 1) * 32 + lane], q, b);
      trade(a, b, lane, 1);
#pragma unroll
      for (int h = 0; h < G; ++h) {
        if (two == 0) level1[h] = a[h];
        else scores[h] = a[h];
      }
    }
    trade(level1, scores, lane, 2);
#pragma unroll
    for (int h = 0; h < G; ++h) {
      if (four == 0) level2[h] = level1[h];
      else scores[h] = level1[h];
    }
  }
  trade(level2, scores, lane, 4);
#pragma unroll
  for (int h = 0; h < G; ++h) {
    float dot = level2[h];
    if (LANES == 16) dot = add_rn(dot, shuffle_xor(dot, 8));
    scores[h] = mul_rn(dot, SCORE_SCALE);
  }
}
DEVICE int block_position(int lane) { return (lane & 7) * PER_PASS + lane / LANES; }
constexpr float NO_SCORE = -3.0e38f;

DEVICE float max_over_warp(float value) {
  int bits = (int)as_bits(value);
  bits ^= (bits >> 31) & 0x7fffffff;  // now integers order as the floats did
  bits = warp_max(bits);
  return as_float((u32)(bits ^ ((bits >> 31) & 0x7fffffff)));
}

// A warp's blocks: an online softmax in base 2. Leaves o[HD], m, l for each head in shared.attend[warp].
DEVICE void attend_blocks(Shared& s, Stream& stream, const Role& role) {
  const int lane = stream.lane, warp = stream.warp, blocks = role.last - role.first;
  const int begin = role.first + share(blocks, warp), end = role.first + share(blocks, warp + 1);
  if (begin == end) return;
  float* scratch = s.attend[warp];
  float q[G][8], o[G * 8], m[G], l[G];
#pragma unroll
  for (int h = 0; h < G; ++h) {
    U4 pairs = *(const U4*)&s.q[h][(lane % LANES) * 8];
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) q[h][2 * e] = low_half(words[e]), q[h][2 * e + 1] = high_half(words[e]);
#pragma unroll
    for (int e = 0; e < 8; ++e) o[h * 8 + e] = 0.0f;
    m[h] = NO_SCORE;
    l[h] = 0.0f;
  }
  for (int block = begin; block < end; ++block) {
    const int live = role.past - block * BLOCK;  // positions of this block that exist, if fewer than BLOCK
    float p[G];
    block_scores(stream.wait(), q, lane, p);
    stream.release();
    const bool is_live = block_position(lane) < live;
#pragma unroll
    for (int h = 0; h < G; ++h) {
      if (!is_live) p[h] = NO_SCORE;
      float top = max_over_warp(p[h]);
      if (top > m[h]) {
        float shrink = exp2_exact(sub_rn(m[h], top));
        l[h] = mul_rn(l[h], shrink);
#pragma unroll
        for (int e = 0; e < 8; ++e) o[h * 8 + e] = mul_rn(o[h * 8 + e], shrink);
        m[h] = top;
      }
      // Rounded to bf16, so that its products with values are exact; the sum below takes the rounded one, too.
      p[h] = is_live ? round_bf16(exp2_exact(sub_rn(p[h], m[h]))) : 0.0f;
      if (LANES == 8 || !(lane & 8)) l[h] = add_rn(l[h], p[h]);
      scratch[block_position(lane) * G + h] = p[h];
    }
    sync_warp();
    const U4* values = stream.wait();
#pragma unroll
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
    scratch[(pair / 8) * (HD + 2) + (lane % LANES) * 8 + pair % 8] = o[i];
  }
#pragma unroll
  for (int h = 0; h < G; ++h) {
    float sum = warp_sum(l[h]);
    if (lane == 0) scratch[h * (HD + 2) + HD] = m[h], scratch[h * (HD + 2) + HD + 1] = sum;
  }
}

// The new position, not in the cache yet when the stream was queued: one more partial result, in slot NW.
DEVICE void attend_new(Shared& s, int lane) {
#pragma unroll
  for (int h = 0; h < G; ++h) {
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

struct Pair { float low, high; };

// Merges the warps' partial results of one head and two dims.
DEVICE Pair merge_warps(const Shared& s, const Role& role, bool has_new, int h, int d, float& m, float& l) {
  const int blocks = role.last - role.first;
  m = NO_SCORE;
  for (int w = 0; w <= NW; ++w) {
    bool there = w == NW ? has_new : share(blocks, w) != share(blocks, w + 1);
    if (there) m = fmaxf(m, s.attend[w][h * (HD + 2) + HD]);
  }
  l = 0.0f;
  Pair o = {0.0f, 0.0f};
  for (int w = 0; w <= NW; ++w) {
    bool there = w == NW ? has_new : share(blocks, w) != share(blocks, w + 1);
    if (!there) continue;
    const float* part = s.attend[w] + h * (HD + 2);
    float weight = exp2_exact(sub_rn(part[HD], m));
    l = add_rn(l, mul_rn(part[HD + 1], weight));
    o.low = add_rn(o.low, mul_rn(part[d], weight));
    o.high = add_rn(o.high, mul_rn(part[d + 1], weight));
  }
  return o;
}

// Words of another CTA's partial result carry a tag, because not every CTA has a part in every step.
DEVICE float poll_tagged(const u64* word, u32 tag, const Exchange& exchange, int where) {
  u64 v = load_relaxed64(word);
  u32 spins = 0;
  while ((u32)(v >> 32) != tag) {
    watchdog(spins, exchange.max_spins, exchange.report, where);
    v = load_relaxed64(word);
  }
  return as_float((u32)v);
}
DEVICE void store_tagged(u64* word, u32 tag, float value) { store_relaxed64(word, (u64)tag << 32 | as_bits(value)); }

// Merges the CTAs' partial results of this KV head; runs in the CTA with the last slot.
DEVICE void merge_ctas(const Params& p, Shared& s, const Exchange& exchange, const Role& role, u32* out, int layer, u32 tag) {
  const u64* first = p.partials + ((long long)layer * gridDim.x + blockIdx.x - (role.slots - 1)) * PARTIAL_WORDS;
  float* sums = &s.attend[0][0];  // [slots][G][2]: m, l
  const int n = role.slots;
  sync_cta();  // everyone is done with the warps' partial results
  for (int i = threadIdx.x; i < n * G * 2; i += NT)
    sums[i] = poll_tagged(first + (i / (G * 2)) * PARTIAL_WORDS + (i / 2 % G) * (HD + 2) + HD + i % 2, tag, exchange, 200 + layer);
  sync_cta();
  for (int i = threadIdx.x; i < G * HD / 2; i += NT) {
    const int h = i / (HD / 2), d = i % (HD / 2) * 2;
    float m = NO_SCORE, l = 0.0f;
    for (int slot = 0; slot < n; ++slot) m = fmaxf(m, sums[(slot * G + h) * 2]);
    Pair o = {0.0f, 0.0f};
    constexpr int AT_ONCE = 8;  // loads in flight
    for (int from = 0; from < n; from += AT_ONCE) {
      u64 low[AT_ONCE], high[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (from + j >= n) continue;
        const u64* part = first + (from + j) * PARTIAL_WORDS + h * (HD + 2) + d;
        low[j] = load_relaxed64(part);
        high[j] = load_relaxed64(part + 1);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (from + j >= n) continue;
        const u64* part = first + (from + j) * PARTIAL_WORDS + h * (HD + 2) + d;
        float a = (u32)(low[j] >> 32) == tag ? as_float((u32)low[j]) : poll_tagged(part, tag, exchange, 300 + layer);
        float b = (u32)(high[j] >> 32) == tag ? as_float((u32)high[j]) : poll_tagged(part + 1, tag, exchange, 300 + layer);
        float weight = exp2_exact(sub_rn(sums[((from + j) * G + h) * 2], m));
        l = add_rn(l, mul_rn(sums[((from + j) * G + h) * 2 + 1], weight));
        o.low = add_rn(o.low, mul_rn(a, weight));
        o.high = add_rn(o.high, mul_rn(b, weight));
      }
    }
    exchange.publish(out + (h * HD + d) / 2, pack_bf16(div_rn(o.low, l), div_rn(o.high, l)));
  }
}

DEVICE void attention(const Params& p, Shared& s, Stream& stream, const Exchange& exchange, int layer, u32 tag) {
  const Role role = s.role;
  if (role.b < 0) return;
  const bool has_new = role.slot == role.slots - 1;
  attention_inputs(p, s, exchange, role, layer);
  sync_cta();
  attend_blocks(s, stream, role);
  if (has_new && stream.warp == NW - 1) attend_new(s, stream.lane);
  if (has_new) fence_async_proxy();  // the cache's new row will be read by bulk copies in later steps
  sync_cta();
  u32* out = exchange.at(layer, AT_ATTENTION) + (role.b * AW + role.kv_head * G * HD) / 2;
  u64* part = p.partials + ((long long)layer * gridDim.x + blockIdx.x) * PARTIAL_WORDS;
  for (int i = threadIdx.x; i < G * HD / 2; i += NT) {
    const int h = i / (HD / 2), d = i % (HD / 2) * 2;
    float m, l;
    Pair o = merge_warps(s, role, has_new, h, d, m, l);
    if (role.slots == 1) {
      exchange.publish(out + (h * HD + d) / 2, pack_bf16(div_rn(o.low, l), div_rn(o.high, l)));
    } else {
      store_tagged(part + h * (HD + 2) + d, tag, o.low);
      store_tagged(part + h * (HD + 2) + d + 1, tag, o.high);
      if (d == 0) store_tagged(part + h * (HD + 2) + HD, tag, m), store_tagged(part + h * (HD + 2) + HD + 1, tag, l);
    }
  }
  if (has_new && role.slots > 1) merge_ctas(p, s, exchange, role, out, layer, tag);
  // The scratch is used again in the next layer, many barriers from here.
}
