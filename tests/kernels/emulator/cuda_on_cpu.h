// Runs the decode kernels on a CPU, unfriendly on purpose. It stands in for tkcc/kernels/cuda/ptx.cu: each CUDA thread
// is a fiber; bulk copies arrive late and their target holds NaNs until then; relaxed stores become visible late and out
// of order across addresses; CTAs are put to sleep at random. A wait that is missing in the kernel shows as a wrong result.
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) U4 { u32 x, y, z, w; };
struct alignas(8) U2 { u32 x, y; };

#define DEVICE inline
#define __device__
#define __noinline__ __attribute__((noinline))
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define TRACE_STAGE(stage)
#define TRACE(event)
#define TRACE_SUM(event, cycles)
#define TRACE_WAIT(sign)
#define TRACE_LOAD()
#define SHARED_MEMORY(Type, name) Type& name = *reinterpret_cast<Type*>(emulator::current->cta->smem)
using std::max;
using std::min;

namespace emulator {
struct Index { u32 x; };
struct Warp {
  u32 arrived = 0, generation = 0;
  u64 values[2][32];
};
struct Cta {
  u32 id = 0, asleep_until = 0;
  u32 arrived[2] = {0, 0}, generation[2] = {0, 0};  // of barriers 0 and 1
  u8* smem = nullptr;
  std::vector<Warp> warps;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Cta* cta = nullptr;
  u32 tid = 0;
  const u32* waits_for = nullptr;  // runnable once *waits_for != seen
  u32 seen = 0;
  bool done = false;
};
struct Copy { u32 due; void* to; const void* from; u32 bytes; u64* barrier; };
struct Store { u32 due; void* to; u64 value; u32 bytes; u32 cta; };

inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline u32 now = 0, grid = 0, threads = 0, failed_at = 0;
inline u64 random_state = 1;
inline std::vector<Copy> copies;
inline std::deque<Store> stores;

inline u32 random_below(u32 n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (u32)((random_state >> 11) % n);
}
inline void yield() { swapcontext(&current->context, &scheduler); }
inline void wait_for_change(const u32* word, u32 seen) {
  current->waits_for = word;
  current->seen = seen;
  while (*word == seen) yield();
  current->waits_for = nullptr;
}
inline void fail(u32 where) {
  failed_at = where ? where : 1;
  yield();
  abort();
}
inline void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "emulator: %s (cta %u, thread %u)\n", what, current->cta->id, current->tid);
  fail(9999);
}
inline void meet(u32& arrived, u32& generation, u32 count) {
  u32 mine = generation;
  if (++arrived == count) {
    arrived = 0;
    ++generation;
  } else {
    wait_for_change(&generation, mine);
  }
}
inline Warp& warp() { return current->cta->warps[current->tid / 32]; }
inline u64 exchange_lanes(u64 value, int partner) {
  Warp& w = warp();
  u32 side = w.generation & 1;
  w.values[side][current->tid % 32] = value;
  meet(w.arrived, w.generation, 32);
  return w.values[side][partner];
}
inline void write(const Store& s) { memcpy(s.to, &s.value, s.bytes); }
inline void settle() {  // lets what is due happen
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].due > now) { ++i; continue; }
    Copy c = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    memcpy(c.to, c.from, c.bytes);
    *c.barrier = (*c.barrier & 1) ^ 1;  // no bytes pending; the phase flips
  }
  for (auto it = stores.begin(); it != stores.end();) {
    if (it->due > now) { ++it; continue; }
    write(*it);
    it = stores.erase(it);
  }
}
inline void push_store(void* to, u64 value, u32 bytes) {
  u32 due = now + random_below(6);
  for (const Store& s : stores) if (s.to == to) due = std::max(due, s.due);  // one address keeps its order
  stores.push_back({due, to, value, bytes, current->cta->id});
}
inline void flush_cta() {  // release: what this CTA stored is visible
  for (auto it = stores.begin(); it != stores.end();) {
    if (it->cta != current->cta->id) { ++it; continue; }
    write(*it);
    it = stores.erase(it);
  }
}
}  // namespace emulator

#define threadIdx (emulator::Index{emulator::current->tid})
#define blockIdx (emulator::Index{emulator::current->cta->id})
#define gridDim (emulator::Index{emulator::grid})

DEVICE float as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
DEVICE u32 as_bits(float value) { u32 u; memcpy(&u, &value, 4); return u; }
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float sub_rn(float a, float b) { return a - b; }
DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float div_rn(float a, float b) { return a / b; }
DEVICE float sqrt_rn(float a) { return std::sqrt(a); }
DEVICE float fma_exact(float a, float b, float c) {
  float product = a * b;
  emulator::check((double)a * (double)b == (double)product || product != product, "fma_exact of an inexact product");
  return product + c;
}
DEVICE u32 bf16_bits(float value) {
  u32 bits = as_bits(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
DEVICE float shuffle_xor(float value, int mask) {
  return as_float((u32)emulator::exchange_lanes(as_bits(value), (emulator::current->tid % 32) ^ mask));
}
DEVICE u64 shuffle_xor64(u64 value, int mask) { return emulator::exchange_lanes(value, (emulator::current->tid % 32) ^ mask); }
DEVICE int warp_max(int value) {
  emulator::Warp& w = emulator::warp();
  u32 side = w.generation & 1;
  emulator::exchange_lanes((u32)value, 0);
  int top = (int)w.values[side][0];
  for (int i = 1; i < 32; ++i) top = std::max(top, (int)w.values[side][i]);
  return top;
}
DEVICE float shuffle_from(float value, int lane) { return as_float((u32)emulator::exchange_lanes(as_bits(value), lane)); }
DEVICE u32 warp_ballot(bool is) {
  emulator::Warp& w = emulator::warp();
  u32 side = w.generation & 1, bits = 0;
  emulator::exchange_lanes(is, 0);
  for (int i = 0; i < 32; ++i) bits |= (u32)w.values[side][i] << i;
  return bits;
}
DEVICE void sync_warp() { emulator::Warp& w = emulator::warp(); emulator::meet(w.arrived, w.generation, 32); }
DEVICE void sync_all() {
  emulator::Cta& c = *emulator::current->cta;
  emulator::meet(c.arrived[0], c.generation[0], emulator::threads);
}
DEVICE void sync_first(int threads) {
  emulator::Cta& c = *emulator::current->cta;
  emulator::meet(c.arrived[1], c.generation[1], threads);
}
DEVICE U4 load_relaxed4(const u32* from) { U4 v; memcpy(&v, from, 16); return v; }
DEVICE U2 load_relaxed2(const u32* from) { return U2{from[0], from[1]}; }
DEVICE u32 load_relaxed(const u32* from) { return *from; }
DEVICE u64 load_relaxed64(const u64* from) { return *from; }
DEVICE void store_relaxed(u32* to, u32 value) { emulator::push_store(to, value, 4); }
DEVICE void store_relaxed4(u32* to, const U4& v) {
  for (int i = 0; i < 4; ++i) emulator::push_store(to + i, i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w, 4);
}
DEVICE void store_relaxed64(u64* to, u64 value) { emulator::push_store(to, value, 8); }
DEVICE void add_release(u32* counter, u32 value) { emulator::flush_cta(); *counter += value; }
DEVICE u32 load_acquire(const u32* from) { return *from; }
DEVICE void prefetch_l2(const void*) {}
DEVICE void prefetch_l2_to_stay(const void*) {}
DEVICE void fence_async_proxy() {}
template <int COUNT>
DEVICE void take_registers() {}
template <int COUNT>
DEVICE void give_registers() {}
DEVICE void pause(bool) { emulator::yield(); }
DEVICE void barrier_init(u64* barrier) { *barrier = 0; }
DEVICE void barrier_init_done() {}
DEVICE void barrier_arrive(u64* barrier) { *barrier ^= 1; }  // one arrival completes a phase
DEVICE bool barrier_test(u64* barrier, u32 parity) { return (*barrier & 1) != parity; }
DEVICE bool barrier_try(u64* barrier, u32 parity) { return barrier_test(barrier, parity); }
DEVICE u64 evict_first_policy() { return 0; }
DEVICE void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  emulator::check((*barrier >> 1) == 0, "a slot is refilled while its copy is in flight");
  emulator::check(((uintptr_t)from & 15) == 0 && ((uintptr_t)to & 15) == 0, "a bulk copy that is not aligned");
  *barrier |= (u64)bytes << 1;
  memset(to, 0xff, bytes);
  emulator::copies.push_back({emulator::now + emulator::random_below(200), to, from, bytes, barrier});
}
DEVICE void bulk_load_once(void* to, const void* from, u32 bytes, u64* barrier, u64) { bulk_load(to, from, bytes, barrier); }
DEVICE void stuck(u32*, u32 where) { emulator::fail(where); }
DEVICE void watchdog(u32& spins, u32 limit, u32* report, u32 where) {
  if (++spins >= limit) stuck(report, where);
  emulator::yield();
}
DEVICE bool barrier_wait(u64* barrier, u32 parity, u32 limit) {
  for (u32 spins = 0; !barrier_test(barrier, parity); emulator::yield())
    if (++spins >= limit) return false;
  return true;
}
DEVICE int multiprocessor() { return (int)((emulator::current->cta->id * 5 + 3) % emulator::grid); }

namespace emulator {
// 0, or where the launch got stuck.
template <class Params>
int launch(void (*kernel)(const Params), const Params& params, u32 num_ctas, u32 num_threads, size_t smem_bytes, u64 seed) {
  static const Params* params_now;
  static void (*kernel_now)(const Params);
  params_now = &params;
  kernel_now = kernel;
  random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  now = failed_at = 0;
  grid = num_ctas;
  threads = num_threads;
  copies.clear();
  stores.clear();
  std::vector<Cta> ctas(num_ctas);
  std::vector<Fiber> fibers(num_ctas * num_threads);
  for (u32 i = 0; i < num_ctas; ++i) {
    ctas[i].id = i;
    ctas[i].smem = (u8*)aligned_alloc(128, (smem_bytes + 127) / 128 * 128);
    memset(ctas[i].smem, 0xff, smem_bytes);
    ctas[i].warps.resize(num_threads / 32);
  }
  constexpr size_t STACK = 96 << 10;
  for (u32 i = 0; i < fibers.size(); ++i) {
    Fiber& f = fibers[i];
    f.cta = &ctas[i / num_threads];
    f.tid = i % num_threads;
    f.stack.reset(new char[STACK]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, +[]() { kernel_now(*params_now); current->done = true; }, 0);
  }
  for (size_t left = fibers.size(); left && !failed_at; ++now) {
    settle();
    Cta& sleeper = ctas[random_below(num_ctas)];
    if (random_below(50) == 0) sleeper.asleep_until = now + random_below(100);
    for (Fiber& f : fibers) {
      if (f.done || f.cta->asleep_until > now || (f.waits_for && *f.waits_for == f.seen)) continue;
      current = &f;
      swapcontext(&scheduler, &f.context);
      left -= f.done;
      if (failed_at) break;
    }
  }
  for (const Store& s : stores) write(s);
  for (Cta& c : ctas) free(c.smem);
  return (int)failed_at;
}
}  // namespace emulator
