"""The machine that a cluster believes to be alone on: a PID, mount and network namespace of its own, and a cgroup.

Its first process (`pause`) is PID 1 of the namespace. The kernel ends every process in a PID namespace with its PID 1,
and mounts, interfaces and nftables rules go with the last process. So killing one process is the whole teardown, and a
cluster that was killed hard leaves cgroup directories and files behind and nothing else.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import cache, flags
from e2e.cluster.errors import ClusterError
from e2e.cluster.names import ClusterName
from e2e.cluster.process import Daemon, Process
from e2e.cluster.progress import output

CGROUP_GONE_DEADLINE_S = 10.0
HOST_DIRS = (
    "/var/lib/cni",
)  # mount points that a sandbox needs on the host; made, and removed by the last one when empty

# What is under /run, /var/log and /var/lib/cni belongs to the cluster alone. /sys stays the host's: mounting it anew
# hides the cgroups below it. node0 is half of a veth pair because kubelet refuses a loopback node address and some
# kernels have no dummy links; bridge-nf-call makes ClusterIPs work between two pods of one bridge.
_FURNISH = f"""
mount -t proc proc /proc
for dir in /run /var/log {" ".join(HOST_DIRS)}; do mount -t tmpfs -o mode=755 tmpfs $dir; done
mkdir -p /run/netns /run/lock
ip link set lo up
ip link add node0 type veth peer name node0p
ip link set node0p up
ip addr add {flags.NODE_IP}/24 dev node0
ip link set node0 up
ip route add default via {flags.NODE_GATEWAY} dev node0
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
"""


@dataclass(frozen=True)
class Sandbox:
    """The namespaces and cgroup of the cluster `name`."""

    name: ClusterName
    pause: Path  # the pause program

    @property
    def anchor(self) -> Daemon:
        return Daemon("sandbox", self.name.run_dir, str(self.name))

    def process(self) -> Process:
        """Its first process, by the host's pid."""
        process = self.anchor.process()
        if process is None:
            raise ClusterError(f"cluster {self.name} is not up: run `python -m e2e.cluster up --name {self.name}`")
        return process

    def enter(self) -> list[str]:
        """The words that, put before a command, run it inside. Not `ip netns exec`: that remounts /sys."""
        return ["nsenter", f"--target={self.process().pid}", "--mount", "--net", "--pid"]

    def enter_network(self) -> list[str]:
        """As `enter`, but with the host's processes and files: for clients, tests and load."""
        return ["nsenter", f"--target={self.process().pid}", "--net"]

    def create(self, *, die_with_parent: bool) -> None:
        """Make and furnish it; with `die_with_parent` it ends when the thread that called this does."""
        if not Path("/proc/sys/net/bridge").exists():  # where the kernel has it as a module
            output(["modprobe", "-a", "br_netfilter", "overlay", "veth", "nf_tables"])
        make_cgroups(self.name)
        unshare = ["unshare", "--mount", "--net", "--pid", "--propagation=slave", "--fork", "--kill-child"]
        with _host_dirs_lock():
            for directory in HOST_DIRS:
                Path(directory).mkdir(parents=True, exist_ok=True)
            self.anchor.start([str(self.pause)], enter=unshare, die_with_parent=die_with_parent)
        output([*self.enter(), "sh", "-euc", _FURNISH], deadline_s=30)

    def destroy(self) -> None:
        """End all that runs in it, found by its record and, should that be lost, by the mark in the environment."""
        process = self.anchor.process()
        if process:
            process.end()
        for stray in marked(self.name):
            stray.end()
        self.anchor.record.unlink(missing_ok=True)
        remove_cgroups(self.name)
        with _host_dirs_lock():
            if not running():  # removing a directory takes the mounts that other namespaces have on it along
                for directory in HOST_DIRS:
                    with suppress(OSError):
                        Path(directory).rmdir()


def _host_dirs_lock() -> AbstractContextManager[None]:
    return cache.lock(cache.root() / "clusters" / ".host-dirs.lock")


def running() -> list[str]:
    """The names of the clusters that are up."""
    names = sorted(path.name for path in (cache.root() / "clusters").glob("[a-z]*") if path.is_dir())
    return [name for name in names if Daemon("sandbox", ClusterName(name).run_dir, name).process()]


def marked(name: ClusterName) -> Iterator[Process]:
    """Every live process that carries the cluster's mark, this one excepted."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            process = Process.of(int(entry.name))
            if process and process.is_marked(str(name)):
                yield process


# cgroups: kubelet's are below one directory a cluster, in each hierarchy that the host has mounted


def cgroup_roots(mountinfo: str) -> list[tuple[Path, bool]]:
    """The mount point of each cgroup hierarchy and whether it is version 2; from the text of /proc/self/mountinfo."""
    roots = []
    for line in mountinfo.splitlines():
        fields, _, filesystem = line.partition(" - ")
        kind = filesystem.split(" ")[0]
        if kind in ("cgroup", "cgroup2"):
            roots.append((Path(re.sub(r"\\040", " ", fields.split(" ")[4])), kind == "cgroup2"))
    return roots


def host_cgroup_roots() -> list[tuple[Path, bool]]:
    return cgroup_roots(Path("/proc/self/mountinfo").read_text())


def make_cgroups(name: ClusterName) -> None:
    """Make the cluster's cgroup everywhere, with what a child needs before a process can enter it."""
    for root, is_v2 in host_cgroup_roots():
        own = root / name.cgroup
        own.mkdir(exist_ok=True)
        if is_v2:
            controllers = (root / "cgroup.controllers").read_text().split()
            for group in (root, own):
                _delegate(group, controllers)
        elif (own / "cpuset.cpus").exists():
            for key in ("cpuset.cpus", "cpuset.mems"):
                (own / key).write_text((root / key).read_text())


def _delegate(group: Path, controllers: Sequence[str]) -> None:
    """Hand a version 2 group's controllers to its children, one by one: a kernel may keep some for itself."""
    for controller in controllers:
        with suppress(OSError):
            (group / "cgroup.subtree_control").write_text(f"+{controller}")


def remove_cgroups(name: ClusterName) -> None:
    """Remove the cluster's cgroups from the leaves up; those of processes just killed stay busy for a moment."""
    until = time.monotonic() + CGROUP_GONE_DEADLINE_S
    left = [root / name.cgroup for root, _ in host_cgroup_roots()]
    while left := [group for group in left if not _remove_tree(group)]:
        if time.monotonic() >= until:
            raise ClusterError(f"cgroups still busy after {CGROUP_GONE_DEADLINE_S:.0f} s: {', '.join(map(str, left))}")
        time.sleep(0.05)


def _remove_tree(group: Path) -> bool:
    for directory, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            os.rmdir(directory)
    return not group.exists()
