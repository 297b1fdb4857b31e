"""Where built things are kept: under ~/.cache/tkcc, each under a key made of what went into it, none in the checkout.

An entry is built in a sibling directory and published by one rename, under a lock, so a reader never sees half of one
and two builders never do the work twice.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
    """Hold an exclusive lock on `path` (made if missing); waits for the process that holds it, which dies with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


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
