// Sizes of one build. The host defines the TKCC_* names: a shape, a batch and a layout of warps and ring slots.
constexpr int B = TKCC_BATCH, L = TKCC_LAYERS, D = TKCC_HIDDEN, H = TKCC_HEADS, K = TKCC_KV_HEADS;
constexpr int HD = TKCC_HEAD_DIM, F = TKCC_FFN, V = TKCC_VOCAB;
constexpr bool QK_NORM = TKCC_QK_NORM;
constexpr float EPS = TKCC_EPS, SCORE_SCALE = TKCC_SCORE_SCALE;  // 1 / sqrt(HD) * log2(e): scores are powers of two
constexpr int NW = TKCC_WARPS, NT = NW * 32, SLOTS = TKCC_SLOTS;
constexpr int THREADS = NT + 128;  // and the loading warpgroup
constexpr int PART_FLOATS = TKCC_PART_FLOATS;
// Loads of one ring that may be on their way at once. More do not come faster, but stand in the way of what CTAs hand to
// each other: with 6, reading a word in L2 takes 1,300 cycles while weights stream, with 3 it takes 300 (H200).
constexpr int IN_FLIGHT = 3;

constexpr int G = H / K;           // query heads of one KV head
constexpr int AW = H * HD;         // width of the attention output
constexpr int QKV = AW + 2 * K * HD;
// A unit is what one warp multiplies at a time: 4 rows x 512 columns of bf16, or 4 KiB of one head's keys or values.
constexpr int UNIT_BYTES = 4096, UNIT_ROWS = 4, UNIT_COLS = 512;
DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int ND = ceil_div(D, UNIT_COLS), NA = ceil_div(AW, UNIT_COLS), NF = ceil_div(F, UNIT_COLS);
constexpr int NX = ND > NA ? ND : NA;
constexpr int BP = B <= 1 ? 1 : B <= 2 ? 2 : B <= 4 ? 4 : 8;  // batch in the reduction tree
constexpr int SUMS = UNIT_ROWS * BP;                            // sums one unit yields
constexpr int TOGETHER = SUMS <= 8 ? 2 : 1;  // units whose lanes are summed at once
constexpr int GROUPS_QKV = QKV / 4, GROUPS_O = D / 4, GROUPS_GU = F / 2, GROUPS_DOWN = D / 4;
constexpr int BLOCK = UNIT_BYTES / 2 / HD;  // positions of one key or value unit
constexpr int LANES = HD / 8;               // lanes that share one position, 8 dims each
constexpr int PER_PASS = 32 / LANES;        // positions a warp looks at in one 512-byte pass; 8 passes a unit

static_assert(D % 8 == 0 && AW % 8 == 0 && F % 8 == 0 && QKV % 4 == 0, "rows and columns come in whole vectors");
static_assert(HD == 64 || HD == 128, "head dims of the models at hand");
static_assert(H % K == 0 && B >= 1 && B <= 8, "");

enum Kind { QKV_STAGE, O_STAGE, GATE_UP_STAGE, DOWN_STAGE, HEAD_STAGE };  // the stages that stream weights
DEVICE constexpr int chunks_of(int kind) { return kind == O_STAGE ? NA : kind == DOWN_STAGE ? NF : ND; }

// Words that stages hand to each other, per layer; each exists twice, for even and odd steps (exchange.cu).
DEVICE constexpr int line_up(int words) { return ceil_div(words, 32) * 32; }
// The attention of one KV head is split over at most MAX_SLOTS CTAs, each of which yields, for its G query heads, their
// outputs as [G][HD / 2] bf16 pairs, and [G][2] floats: the largest score and the sum of the exponentials.
constexpr int MAX_SLOTS = 16, SLOT_WORDS = line_up(G * HD / 2 + 2 * G);
constexpr int AT_QKV = 0;                                     // [B][QKV] float: raw q, k, v
constexpr int AT_ATTENTION = AT_QKV + line_up(B * QKV);       // [B][K][MAX_SLOTS][SLOT_WORDS] what each CTA attended to
constexpr int AT_MID = AT_ATTENTION + B * K * MAX_SLOTS * SLOT_WORDS;  // [B][D] float: residual after O
constexpr int AT_HIDDEN = AT_MID + line_up(B * D);            // [B][F / 2] bf16 pairs: silu(gate) * up
constexpr int AT_OUT = AT_HIDDEN + line_up(B * F / 2);        // [B][D] float: residual after down
constexpr int LAYER_WORDS = AT_OUT + line_up(B * D);
constexpr int PARITY_WORDS = L * LAYER_WORDS;

struct Params {
  const u8* weights;       // units, a run of them for each CTA and warp, in the order of use
  const u32* runs;         // [grid][NW]: first unit of each run
  const u16* run_parts;    // [grid][2 L][NW]: units of QKV; of O, gate-up, down (and, in the last layer, the head)
  const u32* work;         // [5][grid]: first row group | number of row groups << 16, for QKV, O, gate-up, down, head
  const u16* embed;        // [V][D] bf16
  const u16* norms;        // [2 L + 1][D] bf16: input, post-attention of each layer; final
  const u16* qk_norms;     // [2 L][HD] bf16, if QK_NORM
  const float* rope;       // [positions][HD]: HD/2 cosines, HD/2 sines
  u16* keys;               // [L][B][K][kv_capacity][HD] bf16
  u16* values;
  int* tokens;             // [B] in: token of the first step; out: the token after the last
  int* positions;          // [B] in: its position; out: plus num_steps
  int* out_tokens;         // [num_steps][B]
  float* logits;           // [B][V] of the last step, or null
  u32* exchange;           // [2][L][LAYER_WORDS]
  u64* best;               // [2][grid][B]
  u32* counters;           // [0]: arrivals at the end of steps; [32]: steps done
  u32* report;             // [grid][4] pinned host memory: where a watchdog fired
  const u8* tensor_maps;   // of weights, keys, values, 128 bytes each, if TKCC_TENSOR_COPIES
  long long* trace;        // clocks of the last step, if TKCC_TRACE: trace_decode.py
  int cta_is_multiprocessor;  // which part of the work a CTA does: by where it runs, or by its index
  int kv_capacity;         // positions, a multiple of BLOCK
  int num_steps;
  int min_blocks;          // blocks a CTA should have before a head is split over another one
  u32 max_spins;
};

static_assert(sizeof(Params) == TKCC_PARAMS_BYTES, "the host's Params has other fields");

// The part that a CTA has in one attention stage: some blocks of one sequence's KV head.
struct Role {
  int b, kv_head;   // b < 0: none
  int slot, slots;  // which of the CTAs of this head; the last one also attends to the new position
  int first, last;  // blocks [first, last) of BLOCK positions
  int past;         // positions in the cache
};

// A warp's units of one pass over some row groups: chunk by chunk, so that it seldom changes its slice of x.
struct Span {
  int groups, first, end;  // units [first, end) of groups * chunks
  int chunk, group;        // of the first one
};
// What a CTA has of a stage, the same in every layer: row groups, and its warp's units of the first pass over them.
struct alignas(16) Part {
  int first_group, groups;
  Span span;
};
// What one warp prepares of the new position: a query head, or the key, or the value of the role's KV head.
struct InputJob {
  int row;     // of q|k|v, its first
  float* to;   // in shared memory
  u16* cache;  // its place in layer 0's cache, for keys and values
  bool is_q, is_v;
};
// One CTA's shared memory.
constexpr int SCRATCH_FLOATS = G * (HD + 2);
struct Shared {
  alignas(128) u8 ring[NW][SLOTS][UNIT_BYTES];
  alignas(16) float part[2][PART_FLOATS];
  alignas(16) u16 x[B][NX * UNIT_COLS];        // the input of QKV, O, gate-up or the head
  alignas(16) float attend[NW + 1][SCRATCH_FLOATS];  // a warp's probabilities, then its partial result
  alignas(16) float q[G][HD], k_new[HD], v_new[HD];  // of the new position, rounded to bf16
  alignas(16) float rope[B][HD];
  float square_sums[B][NW], rstd[B];
  alignas(8) u64 full[NW][SLOTS], empty[NW][SLOTS];
  u64 best[NW][B];
  Part parts[NW][5];
  int cta;        // which part of the work this is
  int token[B], position[B];
  Role role[2];   // of even and odd steps
  int slots[B];   // of each sequence's KV heads
  InputJob jobs[NW];  // each warp's first one
  // mbarriers, one phase a step: its role is written, and all of its past keys and values; a loading lane is done with it.
  alignas(8) u64 role_known, role_read[NW];
  u16 run_parts[2 * L][NW];
#ifdef TKCC_TRACE
  int trace_stop;
#endif
};
static_assert(sizeof(Shared) <= TKCC_SMEM_BYTES, "the host counts too few bytes: Layout.smem_bytes");
