"""What this device can do at most: a result beyond it is a fault of the measurement, not a fast candidate."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tkcc.engine.step import StepBatch, StepKind
from tkcc.models.forward import ModelConfig

READ_BYTES = 256 << 20
GEMM_SIZE = 768
# A candidate may keep weights in any form whose outputs stay as exact as asked; below one byte a weight none can.
LEAST_BYTES_PER_WEIGHT = 1.0
# Both rates are one library's, measured in passing; leave room for better ones.
READ_MARGIN, GEMM_MARGIN = 1.5, 2.5


@dataclass(frozen=True, slots=True)
class Device:
    read_bytes_per_s: float
    flops_per_s: float

    def best(self, other: "Device") -> "Device":
        return Device(max(self.read_bytes_per_s, other.read_bytes_per_s), max(self.flops_per_s, other.flops_per_s))


def measure(dtype: torch.dtype, threads: int) -> Device:
    """Best of a few: streaming reads from memory, and a square matrix product.

    With one thread by CPU time: a neighbour on the core must not make the device look slow, or a fast candidate would
    look impossible.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    buffer = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    read_s = min(_timed(buffer.sum, clock) for _ in range(6))
    a = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype)
    gemm_s = min(_timed(lambda: a @ a, clock) for _ in range(6))
    return Device(READ_BYTES / read_s, 2 * GEMM_SIZE**3 / gemm_s)


def least_s(config: ModelConfig, device: Device, step: StepBatch) -> float:
    """No right forward pass of this step can take less."""
    d, D = config.hidden_size, config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * D * d
    layer = qkv + config.num_heads * D * d + 3 * config.intermediate_size * d
    head = config.vocab_size * d
    read_s = LEAST_BYTES_PER_WEIGHT * (config.num_layers * layer + head) / (READ_MARGIN * device.read_bytes_per_s)
    rows = len(step.requests) if step.kind is StepKind.PREFILL else step.num_tokens
    flops = 2 * (config.num_layers * layer * step.num_tokens + head * rows)
    return max(read_s, flops / (GEMM_MARGIN * device.flops_per_s))


def _timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start
