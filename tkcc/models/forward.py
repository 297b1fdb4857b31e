"""The contract between an engine and a forward pass: what goes in, what comes out, who owns which memory.

A forward pass is what candidates replace. Batching, scheduling, sampling and block allocation are the engine's.
Plain dataclasses, torch only: GPU hosts may lack pydantic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family (RMSNorm, RoPE, grouped-query attention, SwiGLU)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_word_embeddings: bool
    qk_norm: bool = False  # Qwen3: RMSNorm over each head's q and k before RoPE
    rope_scaling: Mapping[str, float | str] | None = None  # Llama 3's "llama3" rule; None = plain RoPE


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the workload that a forward pass should be fast at."""

    phase: str  # "prefill" or "decode"
    batch: int  # requests in the step
    new_tokens: int  # per request: 1 in decode
    context_tokens: int  # per request, new tokens included
    weight_ratio: float  # share of the workload's time


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """What `build` is told besides weights and cells."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_tokens: int  # slots in one KV block
    num_blocks: int
    num_threads: int  # CPU threads that the forward pass may use
    params: Mapping[str, int | str | bool] = field(default_factory=dict)  # Candidate.params


@dataclass(frozen=True, slots=True)
class KVCache:
    """Paged keys and values, owned by the engine, written in place by the forward pass.

    k, v: [L, N, K, S, D] (layers, blocks, KV heads, slots of a block, head dim). Keys are stored after RoPE.
    Block 0 is a scratch block: page-table padding points at it and its content means nothing.
    """

    k_lnksd: Tensor
    v_lnksd: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step over B requests with T new tokens in all. All tensors int64, on the model's device.

    Request b owns tokens[query_starts[b]:query_starts[b + 1]]; its context (new tokens included) is context_lens[b]
    tokens long and lives in the blocks pages_bp[b], in order. In decode every request has exactly one new token.
    Position p of request b is in slot p % S of block pages_bp[b, p // S].
    """

    tokens_t: Tensor  # [T]
    positions_t: Tensor  # [T]
    slots_t: Tensor  # [T] where this token's K and V go: block * S + slot
    pages_bp: Tensor  # [B, P] block ids, padded with 0 (the scratch block)
    query_starts: tuple[int, ...]  # B + 1 host integers
    context_lens: tuple[int, ...]  # B host integers
    context_b: Tensor  # [B] the same on the device


class ForwardPass(Protocol):
    """Made by `build(spec: BuildSpec, weights: Mapping[str, Tensor], cells: Sequence[Cell]) -> ForwardPass`.

    Weights are read-only, named as in a Hugging Face Llama checkpoint ("model.layers.0.self_attn.q_proj.weight"),
    each [out, in]. With tied embeddings there is no "lm_head.weight".
    """

    def prepare(self, kv: KVCache) -> None:
        """Called once before the first step, untimed but bounded: compile, capture, prepack. May overwrite `kv`."""

    def prefill(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write K and V of all new tokens; return the logits of each request's last new token, [B, V]. A request's
        earlier context (context_lens - new tokens) is already in the cache: a prefix hit or an earlier chunk."""

    def decode(self, batch: Batch, kv: KVCache) -> Tensor:
        """The same with one new token per request; logits [B, V]."""


class Build(Protocol):
    """The one function that a candidate's module must define, under the name `build`."""

    def __call__(self, spec: BuildSpec, weights: Mapping[str, Tensor], cells: Sequence[Cell]) -> ForwardPass: ...
