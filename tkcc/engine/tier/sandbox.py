"""What a candidate's process may do: rlimits, no new privileges, no capabilities, Landlock, seccomp.

Two profiles: a runner executes a candidate and can start nothing; a builder compiles it, so it may start the compiler
and write to its own build cache. What the kernel lacks is named by `missing_features`, and the supervisor refuses to
run without it unless it was told to.
"""

import ctypes
import os
import resource
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tkcc.engine.tier import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 4, 15, 38, 24
_SIGKILL = 9

_SYSTEM_FILES = (
    "/usr", "/lib", "/lib64", "/bin", "/opt", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/alternatives", "/etc/localtime", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
    "/proc/sys/vm", "/proc/sys/kernel/osrelease", "/sys/devices/system", "/sys/kernel/mm", "/dev/urandom",
    "/dev/zero", "/dev/null",
)  # fmt: skip
_WRITABLE_FILES = ("/dev/null",)


@dataclass(frozen=True, slots=True)
class Limits:
    """rlimits of a candidate's process."""

    memory_bytes: int  # private writable memory (RLIMIT_DATA); shared weights and KV blocks do not count
    file_bytes: int  # largest file
    open_files: int = 512
    cpu_s: int = 3600
    processes: int = 64  # and threads, beyond those that the user has; for root a cgroup has to do it


@dataclass(frozen=True, slots=True)
class Profile:
    limits: Limits
    readable: tuple[str, ...]
    writable: tuple[str, ...]
    can_start_processes: bool
    is_confined: bool = True  # False only if the user opted out: rlimits alone


def missing_features() -> list[str]:
    """What this kernel lacks of the containment, in words; empty when all is there."""
    missing = []
    version = landlock.abi()
    if version < landlock.MIN_ABI:
        missing.append(f"Landlock ABI >= {landlock.MIN_ABI} (this kernel: {version or 'none'})")
    reason = seccomp.unsupported_reason()
    if reason:
        missing.append(reason)
    return missing


def python_files() -> tuple[str, ...]:
    """Trees that an import can need: the interpreter, its packages and this package."""
    paths = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, sys.exec_prefix}
    package = Path(__file__).resolve().parents[2]
    return (*sorted(p for p in paths if p not in ("/", "")), str(package))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def set_name(name: str) -> None:
    """As `ps` and the kernel's log show this process, at most 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def hide_memory() -> None:
    """Nobody without privileges can read this process's memory or environment, nor attach to it."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def enter(profile: Profile) -> None:
    """Give up rights, for good. Raises OSError if the kernel refuses a step."""
    _set_limits(profile.limits)
    if not profile.is_confined:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _drop_capabilities(libc)
    landlock.restrict(
        readable=_paths(_SYSTEM_FILES, python_files(), profile.readable),
        writable=_paths(_WRITABLE_FILES, profile.writable),
        can_execute=profile.can_start_processes,
    )
    seccomp.install(profile.can_start_processes)


def _paths(*groups: Iterable[str]) -> list[Path]:
    return [Path(path) for group in groups for path in group]


def _set_limits(limits: Limits) -> None:
    def limit(kind: int, value: int) -> None:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_DATA, limits.memory_bytes)
    limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    limit(resource.RLIMIT_NOFILE, limits.open_files)
    limit(resource.RLIMIT_CPU, limits.cpu_s)
    limit(resource.RLIMIT_MEMLOCK, 0)
    if os.geteuid() != 0:  # root is exempt
        _limit_processes(limits.processes)


def _limit_processes(more: int) -> None:
    """RLIMIT_NPROC counts all that the user has, also where /proc does not show it (other containers): what is there
    is found by trying."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    there = 16
    while there < most:
        resource.setrlimit(resource.RLIMIT_NPROC, (there, hard))
        try:
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        except BlockingIOError:
            there = min(2 * there, most)
        except FileNotFoundError:
            break  # it could have been started
        else:
            break
    wanted = min(there + more, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (wanted, wanted))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """As root: nothing is left of it but the uid, whose files Landlock guards."""
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    data = (ctypes.c_uint32 * 6)()
    if libc.capset(header, data) != 0 and os.geteuid() == 0:
        raise OSError(ctypes.get_errno(), "capset")
