// How stages hand vectors to each other across CTAs without a flag: a word that nobody has written yet holds EMPTY,
// a bit pattern that no stage produces (a NaN that neither float arithmetic nor a bf16 conversion yields), so a reader
// polls the data itself and each 32-bit word speaks for itself: no fence, no counter, no second trip.
// Even and odd steps use different copies. Whoever writes a word empties its twin, which everyone has read: the twin
// is of the step before, and the barrier at the end of each step orders all of that.
constexpr u32 EMPTY = 0xffffffffu;

struct Exchange {
  u32* now;         // this step's copy
  long long other;  // words from it to the other copy
  u32 max_spins;
  u32* report;

  DEVICE u32* at(int layer, int offset) const { return now + layer * LAYER_WORDS + offset; }

  DEVICE void publish(u32* word, u32 value) const {
    store_relaxed(word, value);
    store_relaxed(word + other, EMPTY);
  }
  DEVICE u32 poll(const u32* word, int where) const {
    u32 v = load_relaxed(word), spins = 0;
    while (v == EMPTY) {
      watchdog(spins, max_spins, report, where);
      v = load_relaxed(word);
    }
    return v;
  }
  // Waits until one word is there, before a warp asks for all it wants: polling that goes on for long must be thin, or
  // it takes the bandwidth that weights need.
  DEVICE void await_first(const u32* word, int lane, int where) const {
    if (lane == 0) poll(word, where);
    sync_warp();
  }
  DEVICE void empty4(u32* words) const { store_relaxed4(words + other, U4{EMPTY, EMPTY, EMPTY, EMPTY}); }
  // Reads again until all four words are there. `v` is a first look, taken earlier so that several are in flight.
  DEVICE void finish4(U4& v, const u32* words, int where) const {
    u32 spins = 0;
    while (v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY) {
      watchdog(spins, max_spins, report, where);
      v = load_relaxed4(words);
    }
  }  DEVICE void finish2(U2& v, const u32* words, int where) const {
    u32 spins = 0;
    while (v.x == EMPTY || v.y == EMPTY) {
      watchdog(spins, max_spins, report, where);
      v = load_relaxed2(words);
    }
  }
};
