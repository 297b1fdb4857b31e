// The machine words of the decode kernels: everything that is PTX, and nothing else. A CPU emulator replaces this
// file (tests/kernels/emulator), so the kernels themselves stay plain C++ and run in a test without a GPU.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) U4 { u32 x, y, z, w; };
struct alignas(8) U2 { u32 x, y; };

#define FULL_WARP 0xffffffffu
#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY(Type, name)                \
  extern __shared__ __align__(128) u8 raw_smem[]; \
  Type& name = *reinterpret_cast<Type*>(raw_smem)

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }

// Rounded one operation at a time: the compiler may not contract these into an fma, so torch can repeat them exactly.
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
// Used only where a * b is exact (both are bf16): then fma(a, b, c) is add_rn(c, a * b).
DEVICE float fma_exact(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Two floats to one word of two bf16, round to nearest even; `low` goes into bits 0-15.
DEVICE u32 pack_bf16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(FULL_WARP, value, mask); }
DEVICE u64 shuffle_xor64(u64 value, int mask) { return __shfl_xor_sync(FULL_WARP, value, mask); }
DEVICE float shuffle_from(float value, int lane) { return __shfl_sync(FULL_WARP, value, lane); }
DEVICE u32 warp_ballot(bool is) { return __ballot_sync(FULL_WARP, is); }
DEVICE int warp_max(int value) { return __reduce_max_sync(FULL_WARP, value); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_all() { __syncthreads(); }
// Barrier 1 is for the first `threads` threads, all but the loading warp.
DEVICE void sync_first(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// --- Words that other CTAs write while we look: relaxed, device scope, never from L1.
DEVICE U4 load_relaxed4(const u32* from) {
  U4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
DEVICE U2 load_relaxed2(const u32* from) {
  U2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
DEVICE void store_relaxed4(u32* to, const U4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE u32 load_relaxed(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
DEVICE u64 load_relaxed64(const u64* from) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
DEVICE void store_relaxed(u32* to, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE void store_relaxed64(u64* to, u64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
DEVICE void add_release(u32* counter, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
DEVICE u32 load_acquire(const u32* from) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
DEVICE void prefetch_l2_to_stay(const void* from) { asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(from)); }
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void pause(bool idle) {  // of the loading warp: leave issue slots to the others
  if (idle) asm volatile("nanosleep.u32 20;");
}

// --- mbarriers and bulk copies into shared memory.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE bool barrier_test(u64* barrier, u32 parity) {  // as below, but never suspends the thread
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done;
}
DEVICE bool barrier_try(u64* barrier, u32 parity) {  // waits for the end of the phase, but not for long
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done;
}
// Waits for the end of the phase; false after `limit` tries. The loop is in PTX, where it costs no convergence barrier.
DEVICE bool barrier_wait(u64* barrier, u32 parity, u32 limit) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\t.reg .u32 n;\n\tmov.u32 n, 0;\n\t"
      "AGAIN:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t@p bra.uni DONE;\n\t"
      "add.u32 n, n, 1;\n\tsetp.lt.u32 q, n, %3;\n\t@q bra.uni AGAIN;\n\t"
      "DONE:\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(parity), "r"(limit) : "memory");
  return done;
}

// Weights pass through L2 once a step: marked evict_first they do not push out what is read again (activations, KV).
DEVICE u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void bulk_load_once(void* to_shared, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(to_shared)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}
DEVICE void bulk_load(void* to_shared, const void* from, u32 bytes, u64* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to_shared)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

#ifdef TKCC_TENSOR_COPIES
// The same copy by way of a tensor map, whose rows have 512 bytes. compute-sanitizer's racecheck takes the reads of a
// plain bulk copy's target for hazards, whatever mbarrier they waited for; of these copies it knows better.
DEVICE void tensor_load(void* to_shared, const void* map, int row, u32 bytes, u64* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(shared_address(to_shared)), "l"(map), "r"(0), "r"(row), "r"(shared_address(barrier)) : "memory");
}
#endif

// Warpgroups trade registers: 4 warps of loading give most of theirs to those that compute.
template <int COUNT>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

DEVICE int multiprocessor() {
  int id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// A trace of each warp's clock by stage and event: nothing is compiled in without TKCC_TRACE. `stream` must be in scope.
#ifdef TKCC_TRACE
constexpr int TRACE_EVENTS = 16;
#define TRACE_LOADS ((long long)gridDim.x * (4 * L + 1) * NW * TRACE_EVENTS)
#define TRACE_PROBES (TRACE_LOADS + (long long)gridDim.x * NW * 1024)
#define TRACE_STAGE(stage) \
  stream.trace = p.trace + (((long long)s.cta * (4 * L + 1) + (stage)) * NW + stream.warp) * TRACE_EVENTS, stream.waited = 0
#define TRACE(event) if (stream.lane == 0) stream.trace[event] = clock64()
#define TRACE_SUM(event, cycles) if (stream.lane == 0) stream.trace[event] = (cycles)
#define TRACE_WAIT(sign) waited = waited sign clock64()
#define TRACE_LOAD() if (loads < 1024) p.trace[TRACE_LOADS + ((long long)s.cta * NW + lane) * 1024 + loads++] = clock64()
#else
#define TRACE_STAGE(stage)
#define TRACE(event)
#define TRACE_SUM(event, cycles)
#define TRACE_WAIT(sign)
#define TRACE_LOAD()
#endif

// A wait that never ends would hold the device for good: say where it was, then end the launch with an error.
[[noreturn]] __device__ __noinline__ void stuck(u32* report, u32 where) {
  u32* slot = report + (blockIdx.x & 127) * 4;  // pinned host memory: it outlives the context
  slot[0] = 1;
  slot[1] = where;
  slot[2] = blockIdx.x;
  slot[3] = threadIdx.x;
  __threadfence_system();
  __trap();
  __builtin_unreachable();
}
DEVICE void watchdog(u32& spins, u32 limit, u32* report, u32 where) {
  if (++spins >= limit) stuck(report, where);
}
