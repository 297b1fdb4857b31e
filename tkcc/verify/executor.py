"""Who executes a step: a runner in another process, or the judge's own baseline. Both fill paged KV and give logits."""

import mmap
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tkcc.engine.step import StepBatch, StepKind
from tkcc.engine.tensors import make_batch, make_kv_cache
from tkcc.engine.tier import arena, protocol, tensors
from tkcc.engine.tier.arena import Geometry
from tkcc.engine.tier.protocol import Op, Request, RunnerGoneError, RunnerLateError, Status
from tkcc.models import llama
from tkcc.models.forward import Batch, BuildSpec, KVCache, ModelConfig
from tkcc.verify.clock import RunnerClock

CPU = torch.device("cpu")


class CandidateError(Exception):
    """The candidate raised, or (is_contract) returned what is not logits; the text is its own, not to be trusted."""

    def __init__(self, op: Op, text: str, is_contract: bool) -> None:
        super().__init__(f"{op.name.lower()}: {text}")
        self.op, self.is_contract = op, is_contract


@dataclass(frozen=True, slots=True)
class StepResult:
    logits_bv: Tensor  # a copy, taken while the runner was stopped
    elapsed_s: float


class Executor(Protocol):
    kv: KVCache

    def step(self, step: StepBatch, timeout_s: float, extra_pages: int = 0, reuse_inputs: bool = False) -> StepResult:
        """Run it. extra_pages: columns of scratch-block padding behind the page tables."""


def padded_batch(step: StepBatch, block_tokens: int, extra_pages: int) -> Batch:
    batch = make_batch(step, block_tokens, CPU)
    return replace(batch, pages_bp=F.pad(batch.pages_bp, (0, extra_pages))) if extra_pages else batch


def slots_of(step: StepBatch, block_tokens: int) -> Tensor:
    """Where the new tokens' K and V go, [T]."""
    return torch.tensor(
        [
            request.blocks[p // block_tokens] * block_tokens + p % block_tokens
            for request in step.requests
            for p in range(request.start, request.context)
        ]
    )


def kv_at(kv: KVCache, slots_t: Tensor) -> tuple[Tensor, Tensor]:
    """K and V in these slots, copies, [T, L, K, D] each."""
    S = kv.k_lnksd.shape[3]
    block_t, slot_t = slots_t // S, slots_t % S
    return kv.k_lnksd[:, block_t, :, slot_t], kv.v_lnksd[:, block_t, :, slot_t]


class Local:
    """The baseline revision in the judge's own process: trusted code, for limits and for realistic KV."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, geometry: Geometry, threads: int
    ) -> None:
        self.block_tokens = geometry.block_tokens
        self._spec = BuildSpec(config, dtype, CPU, geometry.block_tokens, geometry.num_blocks, threads)
        self.kv = make_kv_cache(self._spec)
        self.use(weights)

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """From now on with these weights; the cache stays."""
        self.forward = llama.build(self._spec, weights, ())

    def step(self, step: StepBatch, timeout_s: float, extra_pages: int = 0, reuse_inputs: bool = False) -> StepResult:
        batch = padded_batch(step, self.block_tokens, extra_pages)
        start = time.perf_counter()
        run = self.forward.prefill if step.kind is StepKind.PREFILL else self.forward.decode
        logits_bv = run(batch, self.kv)
        return StepResult(logits_bv, time.perf_counter() - start)


class RemoteRunner:
    """A runner, driven through shared memory, timed by this process's clock and stopped whenever it has no request.

    Stopped means SIGSTOP: nothing it started can work between requests, finish late, or slow another runner down.
    """

    def __init__(
        self,
        runner_id: int,
        pid: int,
        fds: Sequence[int],
        config: ModelConfig,
        dtype: str,
        geometry: Geometry,
        retire: Callable[[int, bool], str],
    ) -> None:
        control, step_fd, kv_fd, self.pidfd = fds
        self.id = runner_id
        self._clock = RunnerClock(pid)
        self._retire = retire
        self.control = socket.socket(fileno=control)
        self.block_tokens = geometry.block_tokens
        layout = geometry.step_layout(config.vocab_size, dtype)
        self.buffers = tensors.StepBuffers(_take(step_fd), layout, geometry, config.vocab_size)
        kv_layout = geometry.kv_layout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        self.kv = tensors.kv_views(_take(kv_fd), kv_layout)
        self.is_gone = False  # its process ended
        self.failed = False  # it answered a request with anything but a result
        self.closed = ""

    def load(self, norms_fd: int, timeout_s: float) -> None:
        """Import the candidate and call its build(). Raises like `step`."""
        self._call(Request(Op.LOAD, secrets.randbits(63)), timeout_s, [norms_fd])

    def prepare(self, timeout_s: float) -> None:
        self._call(Request(Op.PREPARE, secrets.randbits(63)), timeout_s)
        self._stop()

    def step(self, step: StepBatch, timeout_s: float, extra_pages: int = 0, reuse_inputs: bool = False) -> StepResult:
        """Raises CandidateError, RunnerGoneError or RunnerLateError."""
        batch = padded_batch(step, self.block_tokens, extra_pages)
        B, T, P = self.buffers.write(batch)
        logits_bv = self.buffers.logits(B)
        logits_bv.fill_(torch.nan)  # what it does not write cannot be right
        op = Op.PREFILL if step.kind is StepKind.PREFILL else Op.DECODE
        request = Request(op, secrets.randbits(63), B, T, P, reuse_inputs)
        self._continue()
        self._clock.start()
        self._call(request, timeout_s)
        elapsed_s = self._clock.stop()
        self._stop()
        return StepResult(logits_bv.clone(), elapsed_s)

    def _call(self, request: Request, timeout_s: float, fds: Sequence[int] = ()) -> None:
        self.failed = True
        try:
            reply = protocol.call(self.control, request, timeout_s, fds)
        except RunnerGoneError:
            self.is_gone = True
            raise
        if reply.status is Status.OK:
            self.failed = False
        else:
            raise CandidateError(request.op, reply.text, reply.status is Status.CONTRACT)

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def _continue(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            self.is_gone = True

    def close(self) -> str:
        """Have it killed, once. Returns how it had ended by itself, if it had."""
        if self.pidfd >= 0:
            self.closed = self._retire(self.id, self.is_gone)
            self.control.close()
            os.close(self.pidfd)
            self.pidfd = -1
        return self.closed


def _take(fd: int) -> mmap.mmap:
    memory = arena.map_file(fd, writable=True)
    os.close(fd)
    return memory


__all__ = [
    "CandidateError", "Executor", "Local", "RemoteRunner", "RunnerGoneError", "RunnerLateError", "StepResult",
    "kv_at", "slots_of",
]  # fmt: skip
