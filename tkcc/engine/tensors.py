"""From the host's words to the device's: a StepBatch becomes a Batch, and the KV cache is made."""

from itertools import accumulate

import torch

from tkcc.engine.step import StepBatch
from tkcc.models.forward import Batch, BuildSpec, KVCache


def make_kv_cache(spec: BuildSpec) -> KVCache:
    """Zeroed keys and values [L, N, K, S, D]; block 0 is the scratch block."""
    config = spec.config
    shape = (config.num_layers, spec.num_blocks, config.num_kv_heads, spec.block_tokens, config.head_dim)
    return KVCache(
        torch.zeros(shape, dtype=spec.dtype, device=spec.device),
        torch.zeros(shape, dtype=spec.dtype, device=spec.device),
    )


def kv_block_bytes(spec: BuildSpec) -> int:
    """Bytes of one block, all layers, keys and values."""
    config = spec.config
    return 2 * config.num_layers * config.num_kv_heads * spec.block_tokens * config.head_dim * spec.dtype.itemsize


def make_batch(step: StepBatch, block_tokens: int, device: torch.device) -> Batch:
    """The step's tensors on `device`; page tables cut to what the context needs and padded with the scratch block."""
    requests = step.requests
    num_pages = [-(-request.context // block_tokens) for request in requests]
    width = max(num_pages)
    positions = [p for request in requests for p in range(request.start, request.context)]
    slots = [
        request.blocks[p // block_tokens] * block_tokens + p % block_tokens
        for request in requests
        for p in range(request.start, request.context)
    ]
    pages = [[*request.blocks[:n], *([0] * (width - n))] for request, n in zip(requests, num_pages, strict=True)]
    contexts = tuple(request.context for request in requests)
    return Batch(
        tokens_t=torch.tensor([t for request in requests for t in request.tokens], device=device),
        positions_t=torch.tensor(positions, device=device),
        slots_t=torch.tensor(slots, device=device),
        pages_bp=torch.tensor(pages, device=device),
        query_starts=(0, *accumulate(len(request.tokens) for request in requests)),
        context_lens=contexts,
        context_b=torch.tensor(contexts, device=device),
    )
