"""CPU kernels written in C: compiled once per content, loaded with ctypes.

A kernel's source travels inside the module that uses it, as text, so that a candidate's digest covers it. The build is
cached in a directory named by the environment (TKCC_BUILD_CACHE); where the compiler must not run, only a cached build
loads. No Python headers, no torch headers: pointers and integers in, a second to compile.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

# Sums may be reordered so that they vectorise. Not -ffast-math: with it, gcc < 13 makes a library set flush-to-zero.
_FAST_SUMS = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
FLAGS = ("-O3", "-march=native", *_FAST_SUMS, "-fPIC", "-shared", "-std=gnu11")
COMPILE_TIMEOUT_S = 60


class NativeBuildError(Exception):
    """The source does not compile, or there is no compiler. The message has the compiler's first error."""


def build_cache() -> Path:
    """TKCC_BUILD_CACHE, else the user's cache directory."""
    given = os.environ.get("TKCC_BUILD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tkcc" / "build"


@cache
def _cpu_identity() -> str:
    """-march=native makes code for one CPU: a cache that moves to another must not hit."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in keys)


def library_path(source: str, flags: tuple[str, ...] = FLAGS) -> Path:
    key = "\0".join((source, *flags, _cpu_identity()))
    return build_cache() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"


def load(source: str, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The library of this C source, compiled unless it is cached. Raises NativeBuildError."""
    path = library_path(source, flags)
    if not path.exists():
        _compile(source, flags, path)
    return ctypes.CDLL(str(path))


def _compile(source: str, flags: tuple[str, ...], path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise NativeBuildError("no C compiler on PATH (gcc, cc or clang)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        c_file, so_file = Path(scratch) / "kernel.c", Path(scratch) / "kernel.so"
        c_file.write_text(source)
        command = [compiler, *flags, str(c_file), "-o", str(so_file), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as err:
            raise NativeBuildError(f"{compiler}: {err}") from err
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NativeBuildError(f"{compiler}: {(errors or ['no output'])[0]}")
        os.replace(so_file, path)  # whole or not at all: two builds of one source may race
