"""Where built things are kept: under ~/.cache/tkcc, each under a key made of what went into it, none in the checkout.

An entry is built in a sibling directory and published by one rename, under a lock, so a reader never sees half of one
and two builders never do the work twice.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from e2e.cluster.errors import ClusterError
from e2e.cluster.progress import say

LOCK_DEADLINE_S = 3600.0  # longer than the longest thing that is done under a lock: Kubernetes built on a busy machine


def root() -> Path:
    """TKCC_CACHE, else ~/.cache/tkcc."""
    configured = os.environ.get("TKCC_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "tkcc"


def digest(*parts: str | bytes) -> str:
    """A key of 12 hex digits over the parts in order; lengths are mixed in, so no two lists of parts run together."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "big"))
        h.update(data)
    return h.hexdigest()[:12]


def digest_files(base: Path, paths: Iterable[Path]) -> str:
    """A key over names (relative to `base`), modes and bytes of files, in whatever order they are given."""
    parts: list[str | bytes] = []
    for path in sorted(paths):
        parts += [str(path.relative_to(base)), "x" if os.access(path, os.X_OK) else "-", path.read_bytes()]
    return digest(*parts)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made if missing); waits for the process that holds it, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        until, is_told = time.monotonic() + LOCK_DEADLINE_S, False
        while not _try_lock(handle):
            if not is_told:
                say(f"another process works on what {path.name} guards; waiting for it")
                is_told = True
            if time.monotonic() >= until:
                raise ClusterError(f"{path} is still locked after {LOCK_DEADLINE_S:.0f} s: see `fuser {path}`")
            time.sleep(0.1)
        yield


def _try_lock(handle: IO[str]) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def entry(path: Path, make: Callable[[Path], None]) -> Path:
    """The cache entry `path` (a directory), made by `make(empty directory)` where it is missing."""
    if path.exists():
        return path
    with lock(path.with_name(f".{path.name}.lock")):
        if path.exists():  # another process built it while we waited
            return path
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(path)
    return path
