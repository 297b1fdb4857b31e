// Each warp's own stream of 4 KiB units: weights and past keys and values, in the order the warp will use them. One
// more warp does nothing but load, a lane for each stream; it refills a ring slot as soon as it is free, so loads run
// ahead across the edges between stages while the warps still wait for other CTAs. Nothing here depends on activations.

// Heads of longer sequences get more CTAs; each of the B * K heads gets at least one.
DEVICE Role attention_role(const int* position, int cta, int grid, int min_blocks, int* slots_of) {
  int total = 0;
#pragma unroll
  for (int b = 0; b < B; ++b) total += K * ceil_div(position[b], BLOCK);
  Role role;
  role.b = -1;
  role.first = role.last = 0;
  int base = 0;
  for (int b = 0; b < B; ++b) {
    int blocks = ceil_div(position[b], BLOCK);
    int slots = 1 + (total ? blocks * (grid - B * K) / total : 0);
    int wanted = ceil_div(blocks, min_blocks);
    slots = max(1, min(min(wanted, MAX_SLOTS), slots));
    slots_of[b] = slots;
    int rank = cta - base;
    if (rank >= 0 && rank < K * slots) {
      role.b = b;
      role.kv_head = rank / slots;
      role.slot = rank % slots;
      role.slots = slots;
      role.first = blocks * role.slot / slots;
      role.last = blocks * (role.slot + 1) / slots;
      role.past = position[b];
    }
    base += K * slots;
  }
  return role;
}
DEVICE int share(int count, int warp) { return count * warp / NW; }  // a warp's part of `count` things starts here

// The loading warp. Lane w serves warp w: for each layer, weights of QKV, then keys and values, then the other weights.
DEVICE void load_streams(const Params& p, Shared& s, int lane) {
  enum Part { WEIGHTS_BEFORE, KEYS_AND_VALUES, WEIGHTS_AFTER };
  const u64 policy = evict_first_policy();
  const bool serves = lane < NW;
  const u8* run = p.weights + (serves ? (long long)p.runs[s.cta * NW + lane] * UNIT_BYTES : 0);
  const u8* weights = run;
  const u8* keys = nullptr;
  const long long to_values = (const u8*)p.values - (const u8*)p.keys;
  int step = 0, layer = 0, part = WEIGHTS_BEFORE, slot = 0;
  int left = serves ? s.run_parts[0][lane] : 0;
  u32 parity = 1;  // an untouched barrier has completed the phase before its first
  bool more = serves;
#ifdef TKCC_TRACE
  int loads = 0;
#endif
  while (warp_max(more)) {
    bool idle = true;
    if (more && left == 0) {  // on to the next part
      if (part == WEIGHTS_BEFORE) {
        if (barrier_test(&s.role_known, step & 1)) {
          fence_async_proxy();
          const Role& role = s.role[step & 1];
          if (role.b >= 0) {
            const int blocks = role.last - role.first, begin = share(blocks, lane);
            left = 2 * (share(blocks, lane + 1) - begin);
            const long long head = (long long)(layer * B + role.b) * K + role.kv_head;
            keys = (const u8*)(p.keys + (head * p.kv_capacity + (role.first + begin) * BLOCK) * HD);
          }
          part = KEYS_AND_VALUES;
          if (layer == L - 1) barrier_arrive(&s.role_read[lane]);
        }
      } else if (part == KEYS_AND_VALUES) {
        part = WEIGHTS_AFTER;
        left = s.run_parts[2 * layer + 1][lane];
      } else {
        part = WEIGHTS_BEFORE;
        if (++layer == L) {
          layer = 0, weights = run, more = ++step < p.num_steps;
#ifdef TKCC_TRACE
          loads = 0;
#endif
        }
        left = s.run_parts[2 * layer][lane];
      }
    }
    bool free = more && left > 0 && barrier_test(&s.empty[lane][slot], parity);
    if (IN_FLIGHT < SLOTS && free) {  // and the load that many before this one has arrived
      const int before = slot < IN_FLIGHT ? slot - IN_FLIGHT + SLOTS : slot - IN_FLIGHT;
      free = barrier_test(&s.full[lane][before], before < slot ? parity ^ 1 : parity);
    }
    if (free) {
      u8* to = s.ring[lane][slot];
#ifdef TKCC_TENSOR_COPIES
      const bool of_cache = part == KEYS_AND_VALUES;
      const u8* from = of_cache ? keys : weights, *base = of_cache ? (const u8*)p.keys : p.weights;
      const int which = of_cache ? 1 + (left & 1) : 0;
      tensor_load(to, p.tensor_maps + 128 * which, (int)((from - base) / 512), UNIT_BYTES, &s.full[lane][slot]);
      if (!of_cache) weights += UNIT_BYTES;
      else if (which == 2) keys += UNIT_BYTES;
#else
      if (part == KEYS_AND_VALUES) {
        const bool is_value = left & 1;  // keys, then values of the same block
        bulk_load(to, is_value ? keys + to_values : keys, UNIT_BYTES, &s.full[lane][slot]);
        if (is_value) keys += UNIT_BYTES;
      } else {
        bulk_load_once(to, weights, UNIT_BYTES, &s.full[lane][slot], policy);
        weights += UNIT_BYTES;
      }
#endif
      TRACE_LOAD();
      --left;
      if (++slot == SLOTS) slot = 0, parity ^= 1;
      idle = false;
    }
    pause(idle);
  }
}

// A warp's end of its stream.
struct Stream {
  Shared* shared;
  int warp, lane;
  int slot;
  u32 parity, max_spins;
  u32* report;
#ifdef TKCC_TRACE
  long long* trace;
  long long waited;
#endif

  // The next unit, once it has arrived.
  DEVICE const U4* wait() {
    TRACE_WAIT(-);
    u64* full = &shared->full[warp][slot];  // the usual case has no loop
    if (!barrier_try(full, parity) && !barrier_wait(full, parity, max_spins)) stuck(report, 1000 + warp);
    TRACE_WAIT(+);
    return (const U4*)shared->ring[warp][slot];
  }
  // On to the one after it.
  DEVICE void skip() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
  // Every lane has read what it wants of the unit: its place is free.
  DEVICE void release() {
    sync_warp();
    if (lane == 0) barrier_arrive(&shared->empty[warp][slot]);
    skip();
  }
};
