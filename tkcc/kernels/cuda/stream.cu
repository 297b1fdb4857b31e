// Each warp's own stream of 4 KiB units: weights and past keys and values, in the order the warp will use them.
// A warp refills a slot of its ring as soon as it has used it, so the ring is always full or in flight, and loads run
// ahead across the edges between stages while the warp still waits for other CTAs. Nothing here depends on activations.

// Heads of longer sequences get more CTAs; each of the B * K heads gets at least one.
DEVICE Role attention_role(const int* position, int cta, int grid, int min_blocks) {
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
    slots = wanted < 1 ? 1 : wanted < slots ? wanted : slots;
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

DEVICE int groups_per_pass(int chunks) { return PART_FLOATS / (chunks * SUMS); }
DEVICE int chunks_of(int kind) { return kind == STAGE_O ? NA : kind == STAGE_DOWN ? NF : ND; }
DEVICE int work_index(int layer, int kind) {  // into Shared.work
  return kind == STAGE_HEAD ? 4 * L : layer * 4 + (kind > STAGE_ATTENTION ? kind - 1 : kind);
}

// Where a warp's loads have got to.
struct Cursor {
  int step, layer, kind, pass;   // the stage being loaded
  int left;                      // units of it still to load
  int row, rows, chunk, chunks;  // place in it, for weights
  const u8* from;
};

// The next stage in which this warp has units; with left == 0 if nothing may be loaded yet, or ever.
__noinline__ __device__ Cursor next_stage(Cursor c, const Params& p, const Shared& s, int warp) {
  constexpr long long U_QKV = (long long)GROUPS_QKV * ND, U_O = (long long)GROUPS_O * NA;
  constexpr long long U_GU = (long long)GROUPS_GU * ND, U_DOWN = (long long)GROUPS_DOWN * NF;
  constexpr long long U_LAYER = U_QKV + U_O + U_GU + U_DOWN;
  while (c.left == 0) {
    const bool weights = c.kind >= 0 && c.kind != STAGE_ATTENTION;
    if (weights && (int)(s.work[work_index(c.layer, c.kind)] >> 16) > (c.pass + 1) * groups_per_pass(chunks_of(c.kind))) {
      ++c.pass;
    } else {
      if (c.kind == STAGE_HEAD && c.step + 1 == p.num_steps) return c;
      if (c.kind == STAGE_QKV && s.role_step != c.step) return c;  // the keys that come next are not all written yet
      c.pass = 0;
      if (c.kind == STAGE_HEAD) {
        c.kind = STAGE_QKV, c.layer = 0, ++c.step;
      } else if (c.kind == STAGE_DOWN && c.layer + 1 < L) {
        c.kind = STAGE_QKV, ++c.layer;
      } else {
        ++c.kind;
      }
    }
    if (c.kind == STAGE_ATTENTION) {
      if (s.role.b < 0) continue;
      int blocks = s.role.last - s.role.first, begin = share(blocks, warp);
      c.left = 2 * (share(blocks, warp + 1) - begin);
      long long head = (long long)(c.layer * B + s.role.b) * K + s.role.kv_head;
      c.from = (const u8*)(p.keys + (head * p.kv_capacity + (s.role.first + begin) * BLOCK) * HD);
      continue;
    }
    // Weights go chunk by chunk, so that a warp seldom changes its slice of x.
    u32 work = s.work[work_index(c.layer, c.kind)];
    c.chunks = chunks_of(c.kind);
    int skip = c.pass * groups_per_pass(c.chunks), groups = (int)(work >> 16) - skip;
    c.rows = min(groups, groups_per_pass(c.chunks));
    int units = c.rows * c.chunks, begin = share(units, warp);
    c.left = share(units, warp + 1) - begin;
    if (c.left == 0) continue;
    c.chunk = begin / c.rows;
    c.row = begin - c.chunk * c.rows;
    long long unit = (c.kind == STAGE_HEAD ? L : c.layer) * U_LAYER;
    if (c.kind == STAGE_O) unit += U_QKV;
    if (c.kind == STAGE_GATE_UP) unit += U_QKV + U_O;
    if (c.kind == STAGE_DOWN) unit += U_QKV + U_O + U_GU;
    c.from = p.weights + (unit + (long long)((work & 0xffff) + skip + c.row) * c.chunks + c.chunk) * UNIT_BYTES;
  }
  return c;
}

struct Stream {
  const Params* params;
  Shared* shared;
  Cursor cursor;
  u64 policy;
  int warp, lane;
  int slot_in, slot_out, in_flight;
  u32 parity;

  DEVICE void start(const Params& p, Shared& s, int warp_, int lane_) {
    params = &p;
    shared = &s;
    policy = evict_first_policy();
    warp = warp_;
    lane = lane_;
    cursor = Cursor{0, 0, -1, 0, 0, 0, 0, 0, 0, nullptr};
    slot_in = slot_out = in_flight = 0;
    parity = 0;
  }

  // Fills the ring as far as it goes.
  DEVICE void pump() {
    Cursor& c = cursor;
    while (in_flight < SLOTS) {
      if (c.left == 0) c = next_stage(c, *params, *shared, warp);
      if (c.left == 0) return;
      u8* slot = shared->ring[warp][slot_in];
      u64* full = &shared->full[warp][slot_in];
      if (c.kind == STAGE_ATTENTION) {  // keys, then values of the same block
        bool is_value = c.left & 1;
        const u8* source = c.from + (is_value ? (const u8*)params->values - (const u8*)params->keys : 0);
        if (lane == 0) bulk_load(slot, source, UNIT_BYTES, full);
        if (is_value) c.from += UNIT_BYTES;
      } else {
        if (lane == 0) bulk_load_once(slot, c.from, UNIT_BYTES, full, policy);
        c.from += (long long)c.chunks * UNIT_BYTES;
        if (++c.row == c.rows) {
          c.row = 0;
          ++c.chunk;
          c.from += (long long)(1 - c.rows * c.chunks) * UNIT_BYTES;
        }
      }
      --c.left;
      ++in_flight;
      slot_in = slot_in + 1 == SLOTS ? 0 : slot_in + 1;
    }
  }

  // The next unit, once it has arrived.
  DEVICE const U4* wait() {
    u64* full = &shared->full[warp][slot_out];
    u32 spins = 0;
    while (!barrier_try_wait(full, parity)) watchdog(spins, params->max_spins, params->report, 1000 + cursor.kind);
    return (const U4*)shared->ring[warp][slot_out];
  }
  // Every lane has read what it wants of the unit: load the next one into its place.
  DEVICE void release() {
    sync_warp();
    --in_flight;
    if (++slot_out == SLOTS) slot_out = 0, parity ^= 1;
    pump();
  }
};
