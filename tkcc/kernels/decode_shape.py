"""Sizes of a decoder model as the decode step sees them, and of the models at hand.

The kernels may not know `tkcc.models`, so this says the same in the few numbers that a step needs.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of low frequencies (its `rope_scaling` of type "llama3")."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """A Llama-family or Qwen3 decoder: RMS norm, RoPE, grouped-query attention, SwiGLU."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qk_norm: bool = False  # Qwen3: an RMS norm over each head of q and k, before RoPE
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    eps: float = 1e-5

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        return self.attention_width + 2 * self.num_kv_heads * self.head_dim

    def kv_bytes(self, context: int) -> int:
        """Bytes of bf16 keys and values of `context` positions of one sequence."""
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim * context

    def inverse_frequencies(self) -> list[float]:
        """Radians per position, one for each pair of dims."""
        pairs = self.head_dim // 2
        plain = [self.rope_theta ** (-i / pairs) for i in range(pairs)]
        return [self._stretch(f) for f in plain] if self.rope_scaling else plain

    def _stretch(self, frequency: float) -> float:
        scaling = self.rope_scaling
        assert scaling is not None
        turns = scaling.original_context * frequency / (2 * math.pi)  # over the context it was trained on
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = min(max(keep, 0.0), 1.0)
        return frequency * (keep + (1 - keep) / scaling.factor)


def _llama(layers: int, hidden: int, heads: int, head_dim: int, ffn: int, tied: bool, factor: float) -> DecodeShape:
    return DecodeShape(layers, hidden, heads, 8, head_dim, ffn, 128256, tied, rope_scaling=RopeScaling(factor))


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> DecodeShape:
    return DecodeShape(layers, hidden, heads, 8, 128, ffn, 151936, tied, qk_norm=True, rope_theta=1e6, eps=1e-6)


SHAPES = {
    "llama-3.2-1b": _llama(16, 2048, 32, 64, 8192, True, 32.0),
    "llama-3.2-3b": _llama(28, 3072, 24, 128, 8192, True, 32.0),
    "llama-3.1-8b": _llama(32, 4096, 32, 128, 14336, False, 8.0),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
}
