"""CUDA C++ to a launchable kernel, at run time: NVRTC, module load, cooperative launch. Nothing about what it runs.

The driver is reached through NVIDIA's own `cuda-bindings`, which torch's CUDA builds bring along.
"""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent / "cuda"


class CompileError(RuntimeError):
    """NVRTC refused the source; the message is its log."""


def read_source(names: tuple[str, ...], defines: Mapping[str, str | int | float]) -> str:
    """The named files of `cuda/` as one translation unit, after the defines."""
    lines = [f"#define {name} {value}" for name, value in defines.items()]
    for name in names:
        lines += [f'#line 1 "{name}"', (SOURCES / name).read_text()]
    return "\n".join(lines) + "\n"


def compile_cubin(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """SASS for `arch` ("sm_90a"). Needs no device. Raises CompileError."""
    from cuda.bindings import nvrtc

    program = _nvrtc(nvrtc.nvrtcCreateProgram(source.encode(), b"tkcc.cu", 0, [], []))
    flags = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-lineinfo", *(o.encode() for o in options)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _nvrtc(nvrtc.nvrtcGetProgramLogSize(program))
        _nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
        raise CompileError(log.decode(errors="replace"))
    cubin: bytes = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
    _nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel that takes one struct by value."""

    function: Any
    smem_bytes: int

    def launch(self, grid: int, threads: int, params: ctypes.Structure, cooperative: bool = True) -> None:
        """Queues it on torch's current stream. Cooperative: refused rather than hung if the grid does not fit at once."""
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        if cooperative:
            launched = driver.cuLaunchCooperativeKernel(
                self.function, grid, 1, 1, threads, 1, 1, self.smem_bytes, stream, ctypes.addressof(arguments)
            )
        else:
            launched = driver.cuLaunchKernel(
                self.function, grid, 1, 1, threads, 1, 1, self.smem_bytes, stream, ctypes.addressof(arguments), 0
            )
        _driver(launched)


def tensor_map(tensor: torch.Tensor, columns: int, box_rows: int) -> bytes:
    """The 128 bytes that describe a contiguous bf16 tensor as rows of `columns`, copied `box_rows` rows at a time."""
    from cuda.bindings import driver

    assert tensor.is_contiguous() and tensor.dtype == torch.bfloat16 and tensor.numel() % columns == 0
    encoded = _driver(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            tensor.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(tensor.numel() // columns)],
            [driver.cuuint64_t(2 * columns)],
            [driver.cuuint32_t(columns), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def load_kernel(source: str, name: str, smem_bytes: int, options: tuple[str, ...] = ()) -> Kernel:
    """Compiles for the current device and loads. Raises CompileError; RuntimeError if the driver refuses."""
    from cuda.bindings import driver

    torch.cuda.init()
    torch.cuda.current_stream()  # torch's primary context is current from here on
    major, minor = torch.cuda.get_device_capability()
    suffix = "a" if major >= 9 else ""
    cubin = _compiled(source, f"sm_{major}{minor}{suffix}", options)
    module = _driver(driver.cuModuleLoadData(cubin))
    function = _driver(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _driver(driver.cuFuncSetAttribute(function, attribute, smem_bytes))
    return Kernel(function, smem_bytes)


@functools.lru_cache(maxsize=32)
def _compiled(source: str, arch: str, options: tuple[str, ...]) -> bytes:
    return compile_cubin(source, arch, options)


def _nvrtc(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import nvrtc

    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {result[0]}")
    return result[1] if len(result) > 1 else None


def _driver(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {result[0]}")
    return result[1] if len(result) > 1 else None
