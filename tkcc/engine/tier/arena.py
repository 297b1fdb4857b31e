"""Memory that the processes of a tier share: sealed weights, a norm slab, KV blocks, and one step's inputs and outputs.

It decides where everything lies. Torch-free: the supervisor makes and keeps these files without torch; `tensors` has
the views. All memory is anonymous (memfd), so it is gone when the last process that holds it is.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

ALIGN = 64  # bytes: a cache line, and a full vector register
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
MAX_BUNDLE_BYTES = 1 << 20  # a candidate's source and parameters

# Linux <fcntl.h>; Python has them only from 3.12 on
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
_SIZE_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a memory file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of one memory file lies."""

    slots: tuple[Slot, ...]
    num_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "Layout":
        slots = tuple(Slot(s["name"], s["dtype"], tuple(s["shape"]), s["offset"]) for s in raw["slots"])
        return Layout(slots, raw["num_bytes"])


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Place (name, dtype, shape) one after the other, each on a cache line."""
    slots: list[Slot] = []
    offset = 0
    for name, dtype, shape in tensors:
        slot = Slot(name, dtype, tuple(shape), offset)
        slots.append(slot)
        offset = -(-(offset + slot.num_bytes) // ALIGN) * ALIGN
    return Layout(tuple(slots), max(offset, ALIGN))


@dataclass(frozen=True, slots=True)
class Geometry:
    """How large one step can be, and the KV cache under it. Runners of one geometry are interchangeable."""

    max_requests: int
    max_tokens: int
    max_pages: int  # of one request
    num_blocks: int
    block_tokens: int

    def step_layout(self, vocab_size: int, dtype: str) -> Layout:
        """Inputs and outputs of one step. The bundle is written once, before a candidate is loaded."""
        return lay_out(
            [
                ("bundle", "int64", (MAX_BUNDLE_BYTES // 8,)),
                ("tokens_t", "int64", (self.max_tokens,)),
                ("positions_t", "int64", (self.max_tokens,)),
                ("slots_t", "int64", (self.max_tokens,)),
                ("pages_bp", "int64", (self.max_requests * self.max_pages,)),
                ("query_starts", "int64", (self.max_requests + 1,)),
                ("context_lens", "int64", (self.max_requests,)),
                ("logits_bv", dtype, (self.max_requests * vocab_size,)),
            ]
        )

    def kv_layout(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> Layout:
        shape = (num_layers, self.num_blocks, num_kv_heads, self.block_tokens, head_dim)
        return lay_out([("k_lnksd", dtype, shape), ("v_lnksd", dtype, shape)])


def create(name: str, num_bytes: int) -> int:
    """A zeroed memory file whose size is fixed; pages are taken on first touch. Returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd


def fix_size(fd: int) -> None:
    """After this nobody can shrink the file under another process (which would kill that one by SIGBUS)."""
    fcntl.fcntl(fd, _ADD_SEALS, _SIZE_SEALS)


def seal(fd: int) -> None:
    """After this no process, root included, can write the file or map it writable. No writable map may exist."""
    fcntl.fcntl(fd, _ADD_SEALS, _SIZE_SEALS | _SEAL_WRITE)


def is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, _GET_SEALS) & _SEAL_WRITE)


def map_file(fd: int, writable: bool) -> mmap.mmap:
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, prot)
