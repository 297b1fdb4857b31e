"""What a cluster is called and where it keeps what it owns; everything that the host can see derives from the name."""

import hashlib
import itertools
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import cache
from e2e.cluster.errors import ClusterError

_UNIQUE = "own-"
_counter = itertools.count(1)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below Linux's ephemeral range (32768-60999), so no client socket sits on one


@dataclass(frozen=True)
class ClusterName:
    """A valid name of a cluster: a lower-case letter, then up to 30 of a-z, 0-9 and '-'."""

    text: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.text):
            raise ClusterError(
                f"cluster name {self.text!r}: use a lower-case letter, then at most 30 of a-z, 0-9 and '-'"
            )

    def __str__(self) -> str:
        return self.text

    @classmethod
    def unique(cls) -> "ClusterName":
        """A name that no other has: this process's id and a counter are in it."""
        return cls(f"{_UNIQUE}{os.getpid()}-{next(_counter)}")

    @classmethod
    def sweep(cls) -> None:
        """Remove what unique clusters left on disk whose process is gone; their daemons went with it."""
        for left in (cache.root() / "clusters").glob(f"{_UNIQUE}*"):
            if not Path("/proc", left.name.removeprefix(_UNIQUE).split("-")[0]).exists():
                shutil.rmtree(left, ignore_errors=True)

    @property
    def run_dir(self) -> Path:
        return cache.root() / "clusters" / self.text

    @property
    def cgroup(self) -> str:
        """Path of its cgroup below each controller's mount point."""
        return f"tkcc-{self.text}"

    def preferred_ports(self, count: int) -> list[int]:
        """A run of `count` ports that is the same at each start of a cluster of this name."""
        slot = int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "big") % (NUM_PORTS // count)
        return [FIRST_PORT + slot * count + i for i in range(count)]


def free_ports(name: ClusterName, count: int) -> list[int]:
    """`count` loopback ports that nothing listens on now: those that the name prefers, else others."""
    preferred = name.preferred_ports(count)
    if all(_is_free(port) for port in preferred):
        return preferred
    candidates = (port for port in range(FIRST_PORT + NUM_PORTS - 1, FIRST_PORT, -1) if _is_free(port))
    return [next(candidates) for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
