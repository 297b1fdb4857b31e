"""A candidate: the baseline, but one request's context is cut to its length where the baseline masks what is beyond it.

`build` is all that a candidate's module must have; see docs/candidates.md.
"""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from tkcc.models.forward import Batch, BuildSpec, Cell, ForwardPass, KVCache
from tkcc.models.llama import Attend, Llama, gather_pages


class OneRequest(Llama):
    def _attend_pages(self, batch: Batch, kv: KVCache) -> Attend:
        if len(batch.context_lens) != 1:
            return super()._attend_pages(batch, kv)
        (context,) = batch.context_lens
        pages_1p = batch.pages_bp[:, : -(-context // self.block_tokens)]

        def attend(layer: int, q_1hd: Tensor, k_tkd: Tensor, v_tkd: Tensor) -> Tensor:
            k_1kcd = gather_pages(kv.k_lnksd[layer], pages_1p)[:, :, :context]
            v_1kcd = gather_pages(kv.v_lnksd[layer], pages_1p)[:, :, :context]
            q_1kgd = q_1hd.view(1, k_1kcd.shape[1], -1, q_1hd.shape[2])  # heads of one KV head attend together
            return F.scaled_dot_product_attention(q_1kgd, k_1kcd, v_1kcd).view_as(q_1hd)

        return attend


def build(spec: BuildSpec, weights: Mapping[str, Tensor], cells: Sequence[Cell]) -> ForwardPass:
    """`cells` are the steps that the workload's time goes into: what a pass can be specialised for."""
    return OneRequest(spec, weights)
