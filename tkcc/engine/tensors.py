"""From the host's words to the device's: a StepBatch becomes a Batch, and the KV cache is made."""

import math
import mmap
from itertools import accumulate

import torch

from tkcc.engine.step import StepBatch
from tkcc.models.forward import Batch, BuildSpec, KVCache


def make_kv_cache(spec: BuildSpec) -> KVCache:
    """Zeroed keys and values [L, N, K, S, D]; block 0 is the scratch block."""
    config = spec.config
    shape = (config.num_layers, spec.num_blocks, config.num_kv_heads, spec.block_tokens, config.head_dim)
    return KVCache(_zeros(shape, spec), _zeros(shape, spec))


def _zeros(shape: tuple[int, ...], spec: BuildSpec) -> torch.Tensor:
    """On a CPU fresh pages of the kernel's, which are zero and take no memory until they are written."""
    if spec.device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
    memory = mmap.mmap(-1, math.prod(shape) * spec.dtype.itemsize)
    return torch.frombuffer(memory, dtype=spec.dtype).view(shape)


def kv_block_bytes(spec: BuildSpec) -> int:
    """Bytes of one block, all layers, keys and values."""
    config = spec.config
    return 2 * config.num_layers * config.num_kv_heads * spec.block_tokens * config.head_dim * spec.dtype.itemsize


def make_batch(step: StepBatch, block_tokens: int, device: torch.device) -> Batch:
    """The step's tensors on `device`; page tables cut to what the context needs and padded with the scratch block.

    All of them are parts of one tensor, so that a step pays for one copy to the device.
    """
    requests = step.requests
    tokens = [token for request in requests for token in request.tokens]
    positions = [p for request in requests for p in range(request.start, request.context)]
    slots = [
        request.blocks[p // block_tokens] * block_tokens + p % block_tokens
        for request in requests
        for p in range(request.start, request.context)
    ]
    contexts = [request.context for request in requests]
    num_pages = [-(-context // block_tokens) for context in contexts]
    width = max(num_pages)
    pages = [
        page
        for request, count in zip(requests, num_pages, strict=True)
        for page in (*request.blocks[:count], *([0] * (width - count)))
    ]
    host = torch.tensor([*tokens, *positions, *slots, *contexts, *pages])
    if device.type == "cuda":
        host = host.pin_memory()  # else the copy would wait for the device
    T, B = len(tokens), len(requests)
    parts = torch.split(host.to(device, non_blocking=True), [T, T, T, B, B * width])
    return Batch(
        tokens_t=parts[0],
        positions_t=parts[1],
        slots_t=parts[2],
        pages_bp=parts[4].view(B, width),
        query_starts=(0, *accumulate(len(request.tokens) for request in requests)),
        context_lens=tuple(contexts),
        context_b=parts[3],
    )
