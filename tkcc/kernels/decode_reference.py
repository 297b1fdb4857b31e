"""What a decode step is, in plain PyTorch over a static cache: the spec of the persistent step, in any dtype.

In float32 it is the truth that logits are measured against; in bf16 it is the plain model whose error sets the bound,
and, captured or compiled, the bench's baseline. Positions are device tensors, so one graph serves every position.

Letters: B sequences, H query heads, K KV heads, D head dim, C cache positions, V vocabulary.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tkcc.kernels.decode_shape import DecodeShape


def random_weights(shape: DecodeShape, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Random bf16 weights by their Hugging Face names, scaled so that activations stay of order one."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float) -> Tensor:
        out = torch.empty(*size, dtype=torch.bfloat16, device=device)
        return out.normal_(std=scale, generator=generator)

    def near_one(size: int) -> Tensor:
        return 1 + normal(size, scale=0.1)

    d, kv = shape.hidden, shape.num_kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": normal(shape.vocab, d, scale=0.1), "model.norm.weight": near_one(d)}
    if not shape.tied:
        weights["lm_head.weight"] = normal(shape.vocab, d, scale=0.1)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        sizes = {
            "self_attn.q_proj": (shape.attention_width, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, shape.attention_width),
            "mlp.gate_proj": (shape.ffn, d),
            "mlp.up_proj": (shape.ffn, d),
            "mlp.down_proj": (d, shape.ffn),
        }
        for name, (rows, cols) in sizes.items():
            weights[f"{prefix}{name}.weight"] = normal(rows, cols, scale=cols**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = near_one(d)
        if shape.qk_norm:
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{name}.weight"] = near_one(shape.head_dim)
    return weights


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim, rounded once."""
    as_float = x.float()
    rstd = torch.rsqrt(as_float.square().mean(-1, keepdim=True) + eps)
    return (as_float * rstd * weight.float()).to(x.dtype)


def rotate_ref(x_bhd: Tensor, cosine_bd: Tensor, sine_bd: Tensor) -> Tensor:
    """RoPE with halves as pairs: dims d and d + D / 2; cosine and sine are [B, D / 2]."""
    a, b = x_bhd.float().chunk(2, dim=-1)
    cosine, sine = cosine_bd[:, None], sine_bd[:, None]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x_bhd.dtype)


class ReferenceDecode:
    """The plain model: one token per sequence and step, all matrices as they come, attention over the whole cache."""

    def __init__(
        self, shape: DecodeShape, weights: Mapping[str, Tensor], keys: Tensor, values: Tensor, rope: Tensor
    ) -> None:
        """keys, values: [layers, B, K, C, D], also setting the dtype; rope: [C, D], cosines then sines, float32."""
        self.shape, self.keys, self.values, self.rope = shape, keys, values, rope
        self.weights = {name: w.to(keys.dtype) for name, w in weights.items()}

    def step(self, tokens_b: Tensor, positions_b: Tensor) -> Tensor:
        """Logits [B, V] in the model's dtype; appends to the caches. No synchronisation."""
        s, w = self.shape, self.weights
        cosine, sine = self.rope[positions_b].chunk(2, dim=-1)
        batch, capacity = tokens_b.shape[0], self.keys.shape[3]
        rows = torch.arange(batch, device=tokens_b.device)
        mask = torch.arange(capacity, device=tokens_b.device) <= positions_b[:, None]  # [B, C]
        x = F.embedding(tokens_b, w["model.embed_tokens.weight"])
        for layer in range(s.num_layers):
            prefix = f"model.layers.{layer}."
            h = rms_norm_ref(x, w[prefix + "input_layernorm.weight"], s.eps)
            q, k, v = (
                F.linear(h, w[f"{prefix}self_attn.{name}_proj.weight"]).view(batch, -1, s.head_dim) for name in "qkv"
            )
            if s.qk_norm:
                q = rms_norm_ref(q, w[prefix + "self_attn.q_norm.weight"], s.eps)
                k = rms_norm_ref(k, w[prefix + "self_attn.k_norm.weight"], s.eps)
            q, k = rotate_ref(q, cosine, sine), rotate_ref(k, cosine, sine)
            self.keys[layer, rows, :, positions_b] = k
            self.values[layer, rows, :, positions_b] = v
            attended = F.scaled_dot_product_attention(
                q[:, :, None],
                self.keys[layer],
                self.values[layer],
                attn_mask=mask[:, None, None],
                enable_gqa=s.num_heads != s.num_kv_heads,
            )
            x = x + F.linear(attended.reshape(batch, -1), w[prefix + "self_attn.o_proj.weight"])
            h = rms_norm_ref(x, w[prefix + "post_attention_layernorm.weight"], s.eps)
            gate, up = (F.linear(h, w[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[prefix + "mlp.down_proj.weight"])
        x = rms_norm_ref(x, w["model.norm.weight"], s.eps)
        return F.linear(x, w["model.embed_tokens.weight" if s.tied else "lm_head.weight"])
