"""Shared memory: what is sealed cannot be written by anybody, and layouts survive the way to another process."""

import errno
import json
import mmap
import os
from dataclasses import asdict

import pytest
import torch

from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.engine.tensors import make_batch
from tkcc.engine.tier import arena, tensors
from tkcc.engine.tier.arena import Geometry, Layout
from tkcc.engine.tier.holder import write_sealed


def test_sealed_memory_can_be_mapped_for_reading_only() -> None:
    fd, layout = write_sealed("test", [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(5, dtype=torch.bfloat16))])
    assert arena.is_sealed(fd)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, layout.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Operation not permitted") as caught:
        os.write(fd, b"x")
    assert caught.value.errno == errno.EPERM
    seen = tensors.views(arena.map_file(fd, writable=False), layout)
    assert torch.equal(seen["a"], torch.arange(6.0).view(2, 3)) and seen["b"].dtype is torch.bfloat16
    os.close(fd)


def test_a_child_that_writes_to_sealed_weights_dies_and_they_stay_as_they_were() -> None:
    fd, layout = write_sealed("test", [("w", torch.ones(4))])
    pid = os.fork()
    if pid == 0:
        tensors.views(arena.map_file(fd, writable=False), layout)["w"].zero_()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert float(tensors.views(arena.map_file(fd, writable=False), layout)["w"].sum()) == 4.0
    os.close(fd)


def test_memory_of_a_fixed_size_cannot_be_cut_under_another_process() -> None:
    fd = arena.create("test", 4096)
    arena.fix_size(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)


def test_a_layout_survives_json_and_keeps_cache_lines_apart() -> None:
    layout = arena.lay_out([("x", "float32", (3,)), ("y", "int64", (2, 5)), ("z", "bfloat16", (7,))])
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert [slot.offset % arena.ALIGN for slot in layout.slots] == [0, 0, 0]
    ends = [slot.offset + slot.num_bytes for slot in layout.slots]
    assert all(end <= slot.offset for end, slot in zip(ends, layout.slots[1:], strict=False))


def test_a_batch_comes_out_of_step_buffers_as_it_went_in() -> None:
    geometry = Geometry(max_requests=3, max_tokens=20, max_pages=4, num_blocks=9, block_tokens=4)
    layout = geometry.step_layout(11, "float32")
    fd = arena.create("test", layout.num_bytes)
    buffers = tensors.StepBuffers(arena.map_file(fd, writable=True), layout, geometry, 11)
    requests = (StepRequest((5, 6, 7), 2, (3, 1)), StepRequest((9,), 0, (8,)))
    batch = make_batch(StepBatch(StepKind.PREFILL, requests), 4, torch.device("cpu"))
    read = buffers.read(*buffers.write(batch), torch.device("cpu"))
    for name, value in asdict(batch).items():
        other = getattr(read, name)
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name
    assert buffers.logits(2).shape == (2, 11)
    os.close(fd)
