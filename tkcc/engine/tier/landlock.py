"""Landlock for candidates: which files they can read and write, and that their signals stay at home.

Deny by default: what is not named cannot be opened, whoever owns it. Works without privileges.
"""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on all architectures
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
_NET_BIND_TCP, _NET_CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15  # rights that a rule on a plain file may name

MIN_ABI = 6  # signals and abstract sockets are scoped since 6


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    version = ctypes.CDLL(None).syscall(_CREATE, None, 0, _VERSION_FLAG)
    return max(int(version), 0)


def _all_fs_rights(version: int) -> int:
    rights = (1 << 13) - 1
    rights |= (1 << 13) if version >= 2 else 0  # refer
    rights |= (1 << 14) if version >= 3 else 0  # truncate
    return rights | ((1 << 15) if version >= 5 else 0)  # ioctl on devices


def restrict(readable: Iterable[Path], writable: Iterable[Path], can_execute: bool) -> None:
    """Confine the calling thread and all it starts, for good. Needs no_new_privs. Paths that do not exist are skipped.

    readable: files and trees to read (and execute, if allowed); writable: also to write, without special files.
    Raises OSError.
    """
    version = abi()
    libc = ctypes.CDLL(None, use_errno=True)
    everything = _all_fs_rights(version)
    attr = _RulesetAttr(
        everything,
        _NET_BIND_TCP | _NET_CONNECT_TCP if version >= 4 else 0,
        _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if version >= 6 else 0,
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(_CREATE, ctypes.byref(attr), size, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    read = _READ_FILE | _READ_DIR | (_EXECUTE if can_execute else 0)
    write = everything & ~(_MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK | _MAKE_FIFO)
    write &= everything if can_execute else ~_EXECUTE
    try:
        for paths, rights in ((readable, read), (writable, write)):
            for path in paths:
                _allow(libc, ruleset, path, rights)
        if libc.syscall(_RESTRICT, ruleset, 0) != 0:
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = _PathBeneathAttr(rights if path.is_dir() else rights & _FILE_ONLY, fd)
        if libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    finally:
        os.close(fd)
