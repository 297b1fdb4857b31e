"""A seccomp filter for candidates, as classic BPF, made by hand: no libseccomp needed.

It decides which system calls a runner (no new process, no socket, no signal to others) and a builder (may start the
compiler) cannot make. Everything else is allowed: files are Landlock's matter, sizes are rlimits'. Forbidden calls fail
with EPERM, so that libraries which only probe for a feature go on without it.
"""

import ctypes
import errno
import os
import platform
import struct

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000
_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1

# struct seccomp_data: nr, arch, instruction pointer, args; low words of the arguments (little endian)
_NR, _ARCH, _ARG0_LOW = 0, 4, 16

_LD_W_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06

# x86-64 numbers (Linux arch/x86/entry/syscalls/syscall_64.tbl)
_SOCKETS = {"socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288}
_OTHERS = {
    "kill": 62, "tkill": 200, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440,
    "process_mrelease": 448, "kcmp": 312,
}  # fmt: skip
_KERNEL = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "add_key": 248, "request_key": 249, "keyctl": 250, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168, "settimeofday": 164,
    "clock_settime": 227, "adjtimex": 159, "acct": 163, "quotactl": 179, "open_by_handle_at": 304, "fsopen": 430,
    "move_mount": 429, "open_tree": 428, "mknod": 133, "mknodat": 259, "personality": 135,
}  # fmt: skip
_SCHEDULING = {  # a candidate must not take cores or priority that the incumbent does not have
    "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314,
    "setpriority": 141, "ioprio_set": 251, "setsid": 112, "setpgid": 109, "migrate_pages": 256, "move_pages": 279,
}  # fmt: skip
_MEMORY = {  # kinds that rlimits do not count; System V and POSIX queues also outlive their maker
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240,
}  # fmt: skip
_PROCESSES = {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322}
_CLONE, _CLONE3, _SOCKETPAIR, _TGKILL = 56, 435, 53, 234


class _Program:
    """BPF instructions in order; jumps are relative, so each rule is a small block that falls through."""

    def __init__(self) -> None:
        self.code = bytearray()

    def add(self, code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> None:
        self.code += struct.pack("<HBBI", code, jump_true, jump_false, k)

    def deny(self, number: int, error: int = errno.EPERM) -> None:
        """The accumulator holds the call's number."""
        self.add(_JEQ, number, 0, 1)
        self.add(_RET, _ERRNO | error)

    def allow_only(self, number: int, first_argument: int) -> None:
        """The call passes with this first argument and no other."""
        self.add(_JEQ, number, 0, 4)
        self.add(_LD_W_ABS, _ARG0_LOW)
        self.add(_JEQ, first_argument, 1, 0)
        self.add(_RET, _ERRNO | errno.EPERM)
        self.add(_RET, _ALLOW)


def program(can_start_processes: bool, own_pid: int) -> bytes:
    """The filter's instructions, 8 bytes each."""
    p = _Program()
    p.add(_LD_W_ABS, _ARCH)
    p.add(_JEQ, _AUDIT_ARCH_X86_64, 1, 0)
    p.add(_RET, _KILL_PROCESS)
    p.add(_LD_W_ABS, _NR)
    p.add(_JGE, _X32_BIT, 0, 1)
    p.add(_RET, _ERRNO | errno.ENOSYS)
    denied = _SOCKETS | _OTHERS | _KERNEL | _SCHEDULING | _MEMORY
    if not can_start_processes:
        denied |= _PROCESSES
    for number in denied.values():
        p.deny(number)
    if not can_start_processes:
        p.deny(_CLONE3, errno.ENOSYS)  # its flags are out of a filter's sight; libc then uses clone
        p.add(_JEQ, _CLONE, 0, 4)
        p.add(_LD_W_ABS, _ARG0_LOW)
        p.add(_JSET, _CLONE_THREAD, 1, 0)
        p.add(_RET, _ERRNO | errno.EPERM)
        p.add(_RET, _ALLOW)
        p.allow_only(_TGKILL, own_pid)  # raise() and abort() signal the caller's own threads
    p.allow_only(_SOCKETPAIR, _AF_UNIX)
    p.add(_RET, _ALLOW)
    return bytes(p.code)


def unsupported_reason() -> str:
    """Empty where the filter can be used."""
    if platform.machine() != "x86_64":
        return f"the seccomp filter is for x86_64, this is {platform.machine()}"
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        return "the kernel has no seccomp filters"
    return ""


def install(can_start_processes: bool) -> None:
    """Filter the calling thread and all it starts, for good. Needs no_new_privs. Raises OSError."""
    code = program(can_start_processes, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))

    class SockFprog(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    prog = SockFprog(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp_set_mode_filter = 1
    if libc.syscall(317, seccomp_set_mode_filter, 0, ctypes.byref(prog)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp refused the filter")
