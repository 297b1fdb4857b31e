// Reads bytes as the decode step reads its weights, and does nothing with them: the read ceiling of this device.
struct ReadParams {
  const u8* ranges[3];
  long long units[3];  // of TKCC_UNIT_BYTES each
  u32* sink;           // one word a warp, so that the reads are used
  u32* report;
  long long* cycles;   // [grid][2]: which multiprocessor, and how long it took
  u32 max_spins;
  int passes;
};
constexpr int NW = TKCC_WARPS, SLOTS = TKCC_SLOTS, UNIT = TKCC_UNIT_BYTES;
struct ReadShared {
  alignas(128) u8 ring[NW][SLOTS][UNIT];
  alignas(8) u64 full[NW][SLOTS];
};

extern "C" __global__ void __launch_bounds__(NW * 32, 1) read_stream(const __grid_constant__ ReadParams p) {
  SHARED_MEMORY(ReadShared, s);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < SLOTS) barrier_init(&s.full[warp][lane]);
  barrier_init_done();
  sync_all();
  const u64 policy = evict_first_policy();
  const long long once = p.units[0] + p.units[1] + p.units[2], total = once * p.passes, stride = (long long)gridDim.x * NW;
  long long next = (long long)blockIdx.x * NW + warp, seen = next;
  auto load = [&](int slot) {
    if (next >= total) return;
    long long at = next % once;
    const u8* from = p.ranges[0];
    if (at >= p.units[0]) {
      at -= p.units[0], from = p.ranges[1];
      if (at >= p.units[1]) at -= p.units[1], from = p.ranges[2];
    }
        if (lane == 0) bulk_load_once(s.ring[warp][slot], from + at * UNIT, UNIT, &s.full[warp][slot], policy);
    next += stride;
  };
  for (int slot = 0; slot < SLOTS; ++slot) load(slot);
  const long long start = clock64();
  u32 sum = 0, parity = 0;
  for (int slot = 0; seen < total; seen += stride) {
    if (!barrier_wait(&s.full[warp][slot], parity, p.max_spins)) stuck(p.report, 1);
    sum += ((const u32*)s.ring[warp][slot])[lane];
    sync_warp();
    load(slot);
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
  sync_all();
  if (threadIdx.x == 0) {
    p.cycles[blockIdx.x * 2] = multiprocessor();
    p.cycles[blockIdx.x * 2 + 1] = clock64() - start;
  }
  if (sum == 0x12345678u) p.sink[blockIdx.x * NW + warp] = sum;
}
