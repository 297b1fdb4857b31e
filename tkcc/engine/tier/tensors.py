"""Torch views of the shared memory in `arena`."""

import mmap
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from tkcc.engine.tier.arena import Geometry, Layout, Slot
from tkcc.models.forward import Batch, KVCache

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def view(memory: mmap.mmap, slot: Slot) -> Tensor:
    """The slot's tensor, no copy. Writing to one that was mapped read-only ends the process with SIGSEGV."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "buffer is not writable": that is the point
        flat = torch.frombuffer(memory, dtype=DTYPES[slot.dtype], count=slot.count, offset=slot.offset)
    return flat.view(slot.shape)


def views(memory: mmap.mmap, layout: Layout) -> dict[str, Tensor]:
    return {slot.name: view(memory, slot) for slot in layout.slots}


def kv_views(memory: mmap.mmap, layout: Layout) -> KVCache:
    tensors = views(memory, layout)
    return KVCache(tensors["k_lnksd"], tensors["v_lnksd"])


class StepBuffers:
    """One step's inputs and outputs in shared memory, seen from either side."""

    def __init__(self, memory: mmap.mmap, layout: Layout, geometry: Geometry, vocab_size: int) -> None:
        self.geometry, self.vocab_size = geometry, vocab_size
        self.tensors: Mapping[str, Tensor] = views(memory, layout)

    def write(self, batch: Batch) -> tuple[int, int, int]:
        """Copy a batch in; returns (requests, tokens, pages a request)."""
        B, P = batch.pages_bp.shape
        T = batch.tokens_t.shape[0]
        g = self.geometry
        assert g.max_requests >= B and g.max_tokens >= T and g.max_pages >= P, (B, T, P, g)
        t = self.tensors
        t["tokens_t"][:T] = batch.tokens_t
        t["positions_t"][:T] = batch.positions_t
        t["slots_t"][:T] = batch.slots_t
        t["pages_bp"][: B * P] = batch.pages_bp.reshape(-1)
        t["query_starts"][: B + 1] = torch.tensor(batch.query_starts)
        t["context_lens"][:B] = torch.tensor(batch.context_lens)
        return B, T, P

    def read(self, num_requests: int, num_tokens: int, num_pages: int, device: torch.device) -> Batch:
        """The batch as new tensors at addresses of the allocator's choice."""
        t = self.tensors
        lens = t["context_lens"][:num_requests]
        return Batch(
            tokens_t=t["tokens_t"][:num_tokens].clone().to(device),
            positions_t=t["positions_t"][:num_tokens].clone().to(device),
            slots_t=t["slots_t"][:num_tokens].clone().to(device),
            pages_bp=t["pages_bp"][: num_requests * num_pages].clone().view(num_requests, num_pages).to(device),
            query_starts=tuple(t["query_starts"][: num_requests + 1].tolist()),
            context_lens=tuple(lens.tolist()),
            context_b=lens.clone().to(device),
        )

    def logits(self, num_requests: int) -> Tensor:
        """[B, V], a view."""
        return self.tensors["logits_bv"][: num_requests * self.vocab_size].view(num_requests, self.vocab_size)
