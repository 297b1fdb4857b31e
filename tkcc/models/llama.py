"""The baseline revision: a Llama-family decoder in plain PyTorch over paged keys and values.

It defines what is right: candidates are measured against it, and a serving pod without an artifact runs it. So it is
kept plain, but not slow: what only the last tokens need is done for them only, RoPE comes from tables, the layers share
a step's indices and mask, and query heads of one KV head attend together, so keys and values are never repeated.

Shape letters: T new tokens, B requests, C context, d hidden, H query heads, K KV heads, G = H / K, D head dim,
R = D / 2, N blocks, S slots of a block, P pages of a request, V vocabulary, L layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tkcc.models.forward import Batch, BuildSpec, Cell, ForwardPass, KVCache, ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer, each [out, in]; the norms are vectors."""

    input_norm_d: Tensor
    q_proj: Tensor  # [H * D, d]
    k_proj: Tensor  # [K * D, d]
    v_proj: Tensor  # [K * D, d]
    o_proj: Tensor  # [d, H * D]
    post_norm_d: Tensor
    gate_proj: Tensor  # [I, d]
    up_proj: Tensor  # [I, d]
    down_proj: Tensor  # [d, I]
    q_norm_d: Tensor | None  # [D], Qwen3 only
    k_norm_d: Tensor | None


# (layer, q_thd, k_tkd, v_tkd) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def build(spec: BuildSpec, weights: Mapping[str, Tensor], cells: Sequence[Cell]) -> ForwardPass:
    """The baseline forward pass. It is the same for every workload: `cells` are ignored.

    Raises KeyError that names a missing weight.
    """
    return Llama(spec, weights)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """RoPE's angle per position for each pair of head dims, [R] in float32; long-context rule "llama3" if asked for."""
    freq_r = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    rule = config.rope_scaling
    if rule is None:
        return freq_r
    factor, low, high = (float(rule[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelengths_in_context_r = float(rule["original_max_position_embeddings"]) * freq_r / (2 * math.pi)
    # 0 below `low` (long waves: stretched by factor), 1 above `high` (short waves: kept), linear between
    keep_r = ((wavelengths_in_context_r - low) / (high - low)).clamp(0, 1)
    return keep_r * freq_r + (1 - keep_r) * freq_r / factor


def rotate(x_thd: Tensor, cos_t1d: Tensor, sin_t1d: Tensor) -> Tensor:
    """RoPE on [T, heads, D]. Dims i and i + D/2 are one pair (the Hugging Face layout); sin is negated below D/2."""
    a_thr, b_thr = x_thd.chunk(2, dim=-1)
    return torch.addcmul(x_thd * cos_t1d, torch.cat((b_thr, a_thr), dim=-1), sin_t1d)


def gather_pages(cache_nksd: Tensor, pages_bp: Tensor) -> Tensor:
    """The context of each request, [B, K, P * S, D], copied out of its pages."""
    _, K, S, D = cache_nksd.shape
    B, P = pages_bp.shape
    pages_bpksd = cache_nksd.index_select(0, pages_bp.reshape(-1)).view(B, P, K, S, D)
    return pages_bpksd.transpose(1, 2).reshape(B, K, P * S, D)


def causal_mask(num_new: int, context: int, device: torch.device) -> Tensor:
    """[T, C] bool: the last `num_new` positions of `context`, each seeing itself and all before."""
    return torch.ones(num_new, context, dtype=torch.bool, device=device).tril(context - num_new)


class Llama:
    """ForwardPass over one KVCache; holds views of the weights, and tables, but no request's data."""

    def __init__(self, spec: BuildSpec, weights: Mapping[str, Tensor]) -> None:
        config = spec.config
        self.config = config
        self.block_tokens = spec.block_tokens
        self.embed_vd = weights["model.embed_tokens.weight"]
        self.norm_d = weights["model.norm.weight"]
        self.head_vd = self.embed_vd if config.tie_word_embeddings else weights["lm_head.weight"]
        self.layers = tuple(self._layer(weights, i) for i in range(config.num_layers))
        positions = min(config.max_positions, spec.num_blocks * spec.block_tokens)
        angle_cr = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config))
        cos_cr, sin_cr = angle_cr.cos(), angle_cr.sin()
        self.cos_cd = torch.cat((cos_cr, cos_cr), dim=-1).to(spec.device, spec.dtype)
        self.sin_cd = torch.cat((-sin_cr, sin_cr), dim=-1).to(spec.device, spec.dtype)

    def _layer(self, weights: Mapping[str, Tensor], index: int) -> Layer:
        def weight(name: str) -> Tensor:
            return weights[f"model.layers.{index}.{name}.weight"]

        return Layer(
            input_norm_d=weight("input_layernorm"),
            q_proj=weight("self_attn.q_proj"),
            k_proj=weight("self_attn.k_proj"),
            v_proj=weight("self_attn.v_proj"),
            o_proj=weight("self_attn.o_proj"),
            post_norm_d=weight("post_attention_layernorm"),
            gate_proj=weight("mlp.gate_proj"),
            up_proj=weight("mlp.up_proj"),
            down_proj=weight("mlp.down_proj"),
            q_norm_d=weight("self_attn.q_norm") if self.config.qk_norm else None,
            k_norm_d=weight("self_attn.k_norm") if self.config.qk_norm else None,
        )

    def prepare(self, kv: KVCache) -> None:
        """Nothing to compile or capture."""

    def prefill(self, batch: Batch, kv: KVCache) -> Tensor:
        last_b = torch.tensor(batch.query_starts[1:], device=batch.tokens_t.device) - 1
        return self._forward(batch, kv, self._attend_ragged(batch, kv), last_b)

    def decode(self, batch: Batch, kv: KVCache) -> Tensor:
        return self._forward(batch, kv, self._attend_pages(batch, kv), None)

    def _forward(self, batch: Batch, kv: KVCache, attend: Attend, last_b: Tensor | None) -> Tensor:
        """All layers over [T] tokens; logits [B, V] of the tokens at last_b (of all, if None)."""
        config, eps = self.config, self.config.rms_norm_eps
        D = config.head_dim
        cos_t1d, sin_t1d = self.cos_cd[batch.positions_t][:, None], self.sin_cd[batch.positions_t][:, None]
        block_t, slot_t = batch.slots_t // self.block_tokens, batch.slots_t % self.block_tokens
        x_td = F.embedding(batch.tokens_t, self.embed_vd)
        for i, w in enumerate(self.layers):
            y_td = F.rms_norm(x_td, x_td.shape[1:], w.input_norm_d, eps)
            k_tkd = F.linear(y_td, w.k_proj).view(-1, config.num_kv_heads, D)
            v_tkd = F.linear(y_td, w.v_proj).view(-1, config.num_kv_heads, D)
            if w.k_norm_d is not None:
                k_tkd = F.rms_norm(k_tkd, (D,), w.k_norm_d, eps)
            k_tkd = rotate(k_tkd, cos_t1d, sin_t1d)
            kv.k_lnksd[i][block_t, :, slot_t] = k_tkd
            kv.v_lnksd[i][block_t, :, slot_t] = v_tkd
            if last_b is not None and i == config.num_layers - 1:
                # Of the last layer only the last tokens are read: from here on they are like a decode step's.
                x_td, y_td, cos_t1d, sin_t1d = x_td[last_b], y_td[last_b], cos_t1d[last_b], sin_t1d[last_b]
                attend = self._attend_pages(batch, kv)
            q_thd = F.linear(y_td, w.q_proj).view(-1, config.num_heads, D)
            if w.q_norm_d is not None:
                q_thd = F.rms_norm(q_thd, (D,), w.q_norm_d, eps)
            attended_thd = attend(i, rotate(q_thd, cos_t1d, sin_t1d), k_tkd, v_tkd)
            x_td = x_td + F.linear(attended_thd.flatten(1), w.o_proj)
            y_td = F.rms_norm(x_td, x_td.shape[1:], w.post_norm_d, eps)
            x_td = x_td + F.linear(F.silu(F.linear(y_td, w.gate_proj)) * F.linear(y_td, w.up_proj), w.down_proj)
        return F.linear(F.rms_norm(x_td, x_td.shape[1:], self.norm_d, eps), self.head_vd)

    def _attend_pages(self, batch: Batch, kv: KVCache) -> Attend:
        """Attention of one token per request, the last of its context, over the context's pages."""
        slots_c = torch.arange(batch.pages_bp.shape[1] * self.block_tokens, device=batch.pages_bp.device)
        mask_b11c = (slots_c < batch.context_b[:, None])[:, None, None, :]

        def attend(layer: int, q_bhd: Tensor, k_tkd: Tensor, v_tkd: Tensor) -> Tensor:
            k_bkcd = gather_pages(kv.k_lnksd[layer], batch.pages_bp)
            v_bkcd = gather_pages(kv.v_lnksd[layer], batch.pages_bp)
            B, H, D = q_bhd.shape
            q_bkgd = q_bhd.view(B, -1, H // k_bkcd.shape[1], D)  # a group's heads stand in the query-position dim
            return F.scaled_dot_product_attention(q_bkgd, k_bkcd, v_bkcd, attn_mask=mask_b11c).reshape(B, H, D)

        return attend

    def _attend_ragged(self, batch: Batch, kv: KVCache) -> Attend:
        """Causal attention of each request's new tokens over its context, one request after another."""
        starts, contexts = batch.query_starts, batch.context_lens
        masks = [
            None if end - start == context else causal_mask(end - start, context, batch.tokens_t.device)
            for start, end, context in zip(starts, starts[1:], contexts, strict=False)
        ]

        def attend(layer: int, q_thd: Tensor, k_tkd: Tensor, v_tkd: Tensor) -> Tensor:
            parts = []
            for b, (context, mask_tc) in enumerate(zip(contexts, masks, strict=True)):
                own = slice(starts[b], starts[b + 1])
                if mask_tc is None:  # the whole context is new
                    k_1kcd, v_1kcd = k_tkd[own].transpose(0, 1)[None], v_tkd[own].transpose(0, 1)[None]
                else:
                    pages_1p = batch.pages_bp[b : b + 1, : -(-context // self.block_tokens)]
                    k_1kcd = gather_pages(kv.k_lnksd[layer], pages_1p)[:, :, :context]
                    v_1kcd = gather_pages(kv.v_lnksd[layer], pages_1p)[:, :, :context]
                q_1htd = q_thd[own].transpose(0, 1)[None]
                out_1htd = F.scaled_dot_product_attention(
                    q_1htd, k_1kcd, v_1kcd, attn_mask=mask_tc, is_causal=mask_tc is None, enable_gqa=True
                )
                parts.append(out_1htd[0].transpose(0, 1))
            return torch.cat(parts)

        return attend
