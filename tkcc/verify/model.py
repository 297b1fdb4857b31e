"""The model as one tier has it, the baseline in the judge's own process, and a reordered twin of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tkcc.engine.tier.tensors import DTYPES
from tkcc.models.forward import ModelConfig


@dataclass(frozen=True, slots=True)
class TierModel:
    """Weights are sealed memory: nobody can write them. Norms are apart, because challenges replace them."""

    config: ModelConfig
    full_layers: int  # of the whole model; this tier may have fewer
    dtype_name: str
    threads: int
    weights: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    norms_fd: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def everything(self) -> dict[str, Tensor]:
        return {**self.weights, **self.norms}


def permuted(weights: Mapping[str, Tensor], config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The same function with its sums in another order: hidden and intermediate channels are permuted.

    Logits, keys and values come out in their usual order, equal up to rounding.
    """
    rng = torch.Generator().manual_seed(seed)
    hidden_d = torch.randperm(config.hidden_size, generator=rng)
    inner_i = torch.randperm(config.intermediate_size, generator=rng)
    out = {}
    for name, w in weights.items():
        kind = name.split(".")[-2]
        if kind in ("input_layernorm", "post_attention_layernorm", "norm"):
            out[name] = w[hidden_d]
        elif kind in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"):
            out[name] = w[:, hidden_d]
        elif kind == "o_proj":
            out[name] = w[hidden_d]
        elif kind in ("gate_proj", "up_proj"):
            out[name] = w[inner_i][:, hidden_d]
        elif kind == "down_proj":
            out[name] = w[hidden_d][:, inner_i]
        else:
            assert kind in ("q_norm", "k_norm"), name
            out[name] = w
    return out
