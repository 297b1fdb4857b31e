"""A runner: the process that executes one candidate, and nothing else in it is worth stealing or forging.

It has read-only weights, a KV arena, a socket to ring on, and no clock, reference, verdict or token. It is killed after
use. A builder is the same process with leave to start a compiler; it only loads and prepares.
"""

import json
import mmap
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tkcc.engine.artifact import load_candidate
from tkcc.engine.tier import arena, protocol, tensors
from tkcc.engine.tier.arena import Geometry, Layout
from tkcc.engine.tier.protocol import Op, Reply, Request, Status
from tkcc.models.forward import Batch, BuildSpec, Cell, ForwardPass, KVCache, ModelConfig


class ContractError(Exception):
    """The candidate returned something that is not what a forward pass returns."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Descriptors of one runner's memory files. They are closed once mapped: a candidate finds none to reopen."""

    step: int
    kv: int
    weights: int


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner is told when it is forked; plain JSON on the way."""

    config: ModelConfig
    dtype: str
    device: str
    geometry: Geometry
    num_threads: int
    cells: tuple[Cell, ...]
    weights: Layout
    norms: Layout

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "RunnerSpec":
        return RunnerSpec(
            config=ModelConfig(**raw["config"]),
            dtype=raw["dtype"],
            device=raw["device"],
            geometry=Geometry(**raw["geometry"]),
            num_threads=raw["num_threads"],
            cells=tuple(Cell(**cell) for cell in raw["cells"]),
            weights=Layout.from_dict(raw["weights"]),
            norms=Layout.from_dict(raw["norms"]),
        )

    def kv_layout(self) -> Layout:
        c = self.config
        return self.geometry.kv_layout(c.num_layers, c.num_kv_heads, c.head_dim, self.dtype)

    def step_layout(self) -> Layout:
        return self.geometry.step_layout(self.config.vocab_size, self.dtype)


def serve(spec: RunnerSpec, mount: Mount, sock: socket.socket) -> None:
    """Answer requests until the driver is gone. Never raises for what a candidate does."""
    runner = _Runner(spec, mount)
    with torch.inference_mode():
        while (received := protocol.receive_request(sock)) is not None:
            sock.send(runner.answer(*received).pack())


class _Runner:
    def __init__(self, spec: RunnerSpec, mount: Mount) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.dtype = tensors.DTYPES[spec.dtype]
        self.weights = tensors.views(_take(mount.weights, writable=False), spec.weights)
        self.kv: KVCache = tensors.kv_views(_take(mount.kv, writable=True), spec.kv_layout())
        self.step_memory = _take(mount.step, writable=True)
        self.buffers = tensors.StepBuffers(self.step_memory, spec.step_layout(), spec.geometry, spec.config.vocab_size)
        self.forward: ForwardPass | None = None
        self.last: Batch | None = None

    def answer(self, request: Request, fd: int) -> Reply:
        try:
            match request.op:
                case Op.LOAD:
                    self.forward = self._load(fd)
                case Op.PREPARE:
                    assert self.forward is not None
                    self.forward.prepare(self.kv)
                case Op.PREFILL | Op.DECODE:
                    self._step(request)
            return Reply(request.seq, Status.OK)
        except ContractError as err:
            return Reply(request.seq, Status.CONTRACT, str(err))
        except BaseException as err:  # SystemExit too: whatever a candidate raises is its own end, not ours
            return Reply(request.seq, Status.ERROR, f"{type(err).__name__}: {err}")

    def _load(self, norms_fd: int) -> ForwardPass:
        norms = tensors.views(_take(norms_fd, writable=False), self.spec.norms)
        slot = self.spec.step_layout().slots[0]
        raw = bytes(self.step_memory[slot.offset : slot.offset + slot.num_bytes]).rstrip(b"\0")
        bundle = json.loads(raw)
        _use_build_cache(bundle["build_cache"])
        build = load_candidate(bundle["source"], bundle["params"])
        spec = BuildSpec(
            config=self.spec.config,
            dtype=self.dtype,
            device=self.device,
            block_tokens=self.spec.geometry.block_tokens,
            num_blocks=self.spec.geometry.num_blocks,
            num_threads=self.spec.num_threads,
            params=bundle["params"],
        )
        return build(spec, {**self.weights, **norms}, self.spec.cells)

    def _step(self, request: Request) -> None:
        assert self.forward is not None
        batch = self.buffers.read(request.num_requests, request.num_tokens, request.num_pages, self.device)
        if request.reuse_inputs and self.last is not None:
            batch = _written_over(self.last, batch)
        self.last = batch
        step = self.forward.prefill if request.op is Op.PREFILL else self.forward.decode
        logits_bv = step(batch, self.kv)
        _check_logits(logits_bv, request.num_requests, self.spec.config.vocab_size, self.dtype, self.device)
        self.buffers.logits(request.num_requests).copy_(logits_bv)  # on a GPU: waits for the step


def _use_build_cache(directory: str) -> None:
    """Where tkcc.kernels.native and Inductor keep what they compile; in a runner, what the builder left there."""
    os.environ["TKCC_BUILD_CACHE"] = directory
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(directory, "inductor")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(directory, "triton")


def _take(fd: int, writable: bool) -> mmap.mmap:
    memory = arena.map_file(fd, writable)
    os.close(fd)
    return memory


def _written_over(last: Batch, new: Batch) -> Batch:
    """`new`'s content at the addresses of `last` wherever the shapes agree."""

    def over(old: Tensor, fresh: Tensor) -> Tensor:
        return old.copy_(fresh) if old.shape == fresh.shape else fresh

    return Batch(
        tokens_t=over(last.tokens_t, new.tokens_t),
        positions_t=over(last.positions_t, new.positions_t),
        slots_t=over(last.slots_t, new.slots_t),
        pages_bp=over(last.pages_bp, new.pages_bp),
        query_starts=new.query_starts,
        context_lens=new.context_lens,
        context_b=over(last.context_b, new.context_b),
    )


def _check_logits(logits: object, num_requests: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    if type(logits) is not Tensor:
        raise ContractError(f"the step returned a {type(logits).__name__}, a plain torch.Tensor is asked for")
    found = (tuple(logits.shape), logits.dtype, logits.device.type, logits.layout)
    wanted = ((num_requests, vocab), dtype, device.type, torch.strided)
    if found != wanted:
        raise ContractError(f"the step returned {found}, asked for is {wanted}")


def main(spec: RunnerSpec, mount: Mount, sock: socket.socket) -> None:
    """The forked process's body: never returns."""
    status = 0
    try:
        serve(spec, mount, sock)
    except BaseException as err:
        os.write(2, f"runner: {type(err).__name__}: {err}\n".encode())
        status = 70
    finally:
        os._exit(status)
