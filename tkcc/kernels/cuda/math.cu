// bf16 words, and an exp2 whose every rounding is spelled out, so that a CPU, a GPU and torch agree to the last bit.
DEVICE float low_half(u32 pair) { return as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return as_float(pair & 0xffff0000u); }
DEVICE float from_bf16(u16 bits) { return as_float((u32)bits << 16); }
DEVICE u16 to_bf16(float value) { return (u16)pack_bf16(value, 0.0f); }
DEVICE float round_bf16(float value) { return low_half(pack_bf16(value, 0.0f)); }

// 2^x for x in [-126, 126], clamped outside; relative error < 3e-7. A Taylor series of 2^f on [-0.5, 0.5].
// Constants are spelled in hex, so that no reader rounds them again.
DEVICE float exp2_exact(float x) {
  x = x < -126.0f ? -126.0f : x;
  x = x > 126.0f ? 126.0f : x;
  float shifted = add_rn(x, 12582912.0f);  // 1.5 * 2^23: the sum's low mantissa bits are round(x)
  float f = sub_rn(x, sub_rn(shifted, 12582912.0f));
  float y = 0x1.4309120000000p-13f;
  y = add_rn(mul_rn(y, f), 0x1.5d87fe0000000p-10f);
  y = add_rn(mul_rn(y, f), 0x1.3b2ab60000000p-7f);
  y = add_rn(mul_rn(y, f), 0x1.c6b08e0000000p-5f);
  y = add_rn(mul_rn(y, f), 0x1.ebfbe00000000p-3f);
  y = add_rn(mul_rn(y, f), 0x1.62e4300000000p-1f);
  y = add_rn(mul_rn(y, f), 1.0f);
  return as_float(as_bits(y) + ((as_bits(shifted) - 0x4b400000u) << 23));
}

template <int COUNT>
DEVICE float mean_of(float sum) {
  return COUNT & (COUNT - 1) ? div_rn(sum, (float)COUNT) : mul_rn(sum, 1.0f / COUNT);  // the same where both are exact
}
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) value = add_rn(value, shuffle_xor(value, mask));
  return value;
}

// Sums N values over the lanes that differ in their first LEVELS bits, always in the tree 1, 2, 4, ... While several
// values are left, partners trade halves, so N sums cost about N shuffles. A lane then holds, in values[0] and on, the
// sums of the values from `reduced_index` on: N >> LEVELS of them, or one, which several lanes have.
template <int N, int LEVELS = 5, int LEVEL = 0>
DEVICE void reduce_over_lanes(float (&values)[N], int lane) {
  if constexpr (LEVEL < LEVELS) {
    constexpr int half = (N >> LEVEL) / 2;
    const bool upper = (lane >> LEVEL) & 1;
    if constexpr (half == 0) {
      values[0] = add_rn(values[0], shuffle_xor(values[0], 1 << LEVEL));
    } else {
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float keep = upper ? values[i + half] : values[i];
        const float send = upper ? values[i] : values[i + half];
        values[i] = add_rn(keep, shuffle_xor(send, 1 << LEVEL));
      }
    }
    reduce_over_lanes<N, LEVELS, LEVEL + 1>(values, lane);
  }
}
template <int N, int LEVELS = 5>
DEVICE int reduced_index(int lane) {
  int index = 0;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) index += ((lane >> level) & 1) * ((N >> level) / 2);
  return index;
}
