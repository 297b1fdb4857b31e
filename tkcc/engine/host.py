"""Sets up a process of the engine: the cores it may use, torch's threads, and the C allocator. Names its device."""

import ctypes
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from tkcc.engine.tier.cpus import parse_cpus

if TYPE_CHECKING:
    import torch

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 1 << 30


def pin_to_cpus() -> None:
    """Obey TKCC_CPUS, a list like "0" or "1-3". Raises ValueError when it names no core that is there."""
    text = os.environ.get("TKCC_CPUS")
    if text:
        try:
            os.sched_setaffinity(0, parse_cpus(text))
        except (ValueError, OSError) as err:
            raise ValueError(f"TKCC_CPUS={text}: {err}") from err


def use_one_arena() -> bool:
    """One heap for all threads, before the first of them starts; false where the C library is not glibc.

    The thread that runs steps would get a heap of its own, which is trimmed however the main one is set.
    """
    return _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> bool:
    """Let malloc keep what tensors give back instead of returning it to the kernel; false where it is not glibc.

    Activations of a step are freed and allocated again in the next one. By default glibc unmaps them, and every step
    pays for fresh zeroed pages: 40 % of the CPU time of a decode step of batch 8 (docs/log.md, 2026-11-30). To be
    called once the large, lasting tensors are there, as those are better mapped.
    """
    return _mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES) and _mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def _mallopt(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except AttributeError:
        return False


def set_threads(num_threads: int) -> None:
    """Threads inside one torch operator; operators themselves run one after another."""
    import torch

    torch.set_num_threads(num_threads)


def device_name(device: "torch.device | None" = None) -> str:
    """As artifacts name it: the GPU's name, or "cpu: <model name>", for no `device` too."""
    if device is not None and device.type != "cpu":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # Not every architecture's kernel tells a model name.
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"cpu: {name}"
