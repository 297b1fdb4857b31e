"""The read ceiling: streams given tensors once, as the decode step streams its weights, and computes nothing.

Its torch reference is no more than "touch these bytes"; what is measured is time.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tkcc.kernels import nvrtc


class _Params(ctypes.Structure):
    _fields_ = (
        ("ranges", ctypes.c_void_p * 3),
        ("units", ctypes.c_longlong * 3),
        ("sink", ctypes.c_void_p),
        ("report", ctypes.c_void_p),
        ("cycles", ctypes.c_void_p),
        ("max_spins", ctypes.c_uint32),
        ("passes", ctypes.c_int),
    )


class ReadStream:
    """Bulk copies into a shared-memory ring on every multiprocessor, `unit_bytes` at a time."""

    def __init__(self, unit_bytes: int = 16384, warps: int = 4, in_flight_bytes: int = 196_608) -> None:
        slots = in_flight_bytes // (warps * unit_bytes)
        assert 1 <= slots <= 32, slots
        sizes = {"TKCC_WARPS": warps, "TKCC_SLOTS": slots, "TKCC_UNIT_BYTES": unit_bytes}
        source = nvrtc.read_source(("ptx.cu", "read_stream.cu"), sizes)
        self.unit_bytes, self.threads = unit_bytes, 32 * warps
        smem_bytes = warps * slots * (unit_bytes + 8) + 128
        self._kernel = nvrtc.load_kernel(source, "read_stream", smem_bytes)
        self._grid = torch.cuda.get_device_properties().multi_processor_count
        self._sink = torch.zeros(self._grid * warps, dtype=torch.int32, device="cuda")
        self._cycles = torch.zeros(self._grid, 2, dtype=torch.int64, device="cuda")
        self._report = torch.zeros(128, 4, dtype=torch.int32, pin_memory=True)

    def run(self, parts: Sequence[tuple[Tensor, int]], passes: int = 1) -> int:
        """Queues `passes` reads of the first `bytes` of up to three contiguous tensors; returns the bytes it reads."""
        assert 1 <= len(parts) <= 3
        params = _Params(
            sink=self._sink.data_ptr(),
            report=self._report.data_ptr(),
            cycles=self._cycles.data_ptr(),
            max_spins=1 << 24,
            passes=passes,
        )
        total = 0
        for i, (tensor, num_bytes) in enumerate(parts):
            assert tensor.is_contiguous() and num_bytes <= tensor.numel() * tensor.element_size()
            params.ranges[i], params.units[i] = tensor.data_ptr(), num_bytes // self.unit_bytes
            total += params.units[i] * self.unit_bytes * passes
        self._kernel.launch(self._grid, self.threads, params)
        return total
