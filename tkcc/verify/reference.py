"""What is right: a dense decoder of the Llama family, one precision above the incumbent, without pages or a cache.

It shares no code with the baseline revision, so a fault there shows. Slow and simple; every position at once.

Shape letters: n positions of all sequences together, d hidden, H query heads, K KV heads, D head dim, W wanted rows,
V vocabulary, L layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tkcc.models.forward import ModelConfig

ONE_ABOVE = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclass(frozen=True, slots=True)
class Truth:
    """The reference's outputs for some sequences laid end to end."""

    logits_wv: Tensor
    k_lnkd: Tensor  # after RoPE
    v_lnkd: Tensor


def run(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    sequences: Sequence[Tensor],
    wanted: Sequence[tuple[int, int]],
) -> Truth:
    """All sequences of token ids; logits at the wanted (sequence, position) pairs, in that order."""
    lens = [len(tokens) for tokens in sequences]
    starts = [sum(lens[:i]) for i in range(len(lens))]
    spans = [slice(start, start + n) for start, n in zip(starts, lens, strict=True)]
    position_n = torch.cat([torch.arange(n) for n in lens])
    angle_nr = position_n.to(dtype)[:, None] * _frequencies(config, dtype)
    cos_n1r, sin_n1r = angle_nr.cos()[:, None], angle_nr.sin()[:, None]
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim

    def weight(name: str) -> Tensor:
        return weights[f"{name}.weight"].to(dtype)

    x_nd = weights["model.embed_tokens.weight"][torch.cat(list(sequences))].to(dtype)
    keys, values = [], []
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        y_nd = _rms_norm(x_nd, weight(f"{layer}.input_layernorm"), config.rms_norm_eps)
        q_nhd = (y_nd @ weight(f"{layer}.self_attn.q_proj").T).view(-1, H, D)
        k_nkd = (y_nd @ weight(f"{layer}.self_attn.k_proj").T).view(-1, K, D)
        v_nkd = (y_nd @ weight(f"{layer}.self_attn.v_proj").T).view(-1, K, D)
        if config.qk_norm:
            q_nhd = _rms_norm(q_nhd, weight(f"{layer}.self_attn.q_norm"), config.rms_norm_eps)
            k_nkd = _rms_norm(k_nkd, weight(f"{layer}.self_attn.k_norm"), config.rms_norm_eps)
        q_nhd, k_nkd = _rotate(q_nhd, cos_n1r, sin_n1r), _rotate(k_nkd, cos_n1r, sin_n1r)
        keys.append(k_nkd)
        values.append(v_nkd)
        out_nhd = torch.cat([_attend(q_nhd[span], k_nkd[span], v_nkd[span]) for span in spans])
        x_nd = x_nd + out_nhd.flatten(1) @ weight(f"{layer}.self_attn.o_proj").T
        y_nd = _rms_norm(x_nd, weight(f"{layer}.post_attention_layernorm"), config.rms_norm_eps)
        gate_ni = y_nd @ weight(f"{layer}.mlp.gate_proj").T
        up_ni = y_nd @ weight(f"{layer}.mlp.up_proj").T
        x_nd = x_nd + (gate_ni * torch.sigmoid(gate_ni) * up_ni) @ weight(f"{layer}.mlp.down_proj").T
    rows_w = torch.tensor([starts[s] + p for s, p in wanted], dtype=torch.int64)
    x_wd = _rms_norm(x_nd[rows_w], weight("model.norm"), config.rms_norm_eps)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return Truth(x_wd @ weight(head).T, torch.stack(keys), torch.stack(values))


def _frequencies(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """RoPE's angle per position, [D / 2]."""
    exponent_r = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    freq_r = torch.pow(torch.tensor(config.rope_theta, dtype=torch.float64), -exponent_r)
    rule = config.rope_scaling
    if rule is not None:  # "llama3": stretch long waves by `factor`, keep short ones, interpolate between
        factor, low, high = (float(rule[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        turns_r = float(rule["original_max_position_embeddings"]) * freq_r / (2 * math.pi)
        keep_r = ((turns_r - low) / (high - low)).clamp(0, 1)
        freq_r = freq_r * (keep_r + (1 - keep_r) / factor)
    return freq_r.to(dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rotate(x_nhd: Tensor, cos_n1r: Tensor, sin_n1r: Tensor) -> Tensor:
    a, b = x_nhd.tensor_split(2, dim=-1)
    return torch.cat((a * cos_n1r - b * sin_n1r, b * cos_n1r + a * sin_n1r), dim=-1)


def _attend(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
    n, H, D = q_nhd.shape
    group = H // k_nkd.shape[1]
    out_nhd = torch.empty_like(q_nhd)
    future_nn = torch.ones(n, n, dtype=torch.bool).triu(1)
    for h in range(H):
        score_nn = q_nhd[:, h] @ k_nkd[:, h // group].T / math.sqrt(D)
        out_nhd[:, h] = score_nn.masked_fill(future_nn, -torch.inf).softmax(-1) @ v_nkd[:, h // group]
    return out_nhd
