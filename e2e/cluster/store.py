"""Images, unpacked once for all clusters: a containerd store in the cache from which each cluster starts with a copy.

Unpacking three images takes a cluster's containerd some twenty seconds; a copy of hard links takes one or two. That is
safe because nothing writes to an unpacked layer: a container's writes go to a layer of its own. The databases are
copied truly. Only layers that the store lacks are ever written to it, so a changed source costs its own small layer.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import cache, progress

ADD_DEADLINE_S = 600.0

# In namespaces of its own, so that its sockets and mounts meet no other containerd's and end with it.
_ADD = """
mount -t tmpfs -o mode=755 tmpfs /run
containerd --config="$CONFIG" &
server=$!
until ctr version >/dev/null 2>&1; do kill -0 $server; sleep 0.1; done
ctr --namespace=k8s.io images import "$ARCHIVE"
for image in $UNWANTED; do ctr --namespace=k8s.io images remove --sync "$image"; done
kill $server
wait $server || true
"""


def _root() -> Path:
    return cache.root() / "containerd"


def images() -> list[str]:
    """References of the images that every new cluster has, oldest first."""
    listed = _root() / "images.json"
    found: list[str] = json.loads(listed.read_text()) if listed.exists() else []
    return found


@contextmanager
def layout() -> Iterator[Path]:
    """A temporary OCI image layout that holds the store's blobs, so that a writer adds only what is new.

    For one user at a time; what a killed one left goes first.
    """
    for left in cache.root().glob("layout-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="layout-", dir=cache.root()) as directory:
        blobs = Path(directory) / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for blob in _blobs().glob("*"):
            os.link(blob, blobs / blob.name)
        yield Path(directory)


def add(layout: Path, references: Sequence[str], *, keep: int) -> None:
    """Unpack the images that were written to a `layout()`; of each repository the newest `keep` stay."""
    with cache.lock(_lock()):
        have = [image for image in images() if image not in references]
        staying = newest([*have, *references], keep)
        root = _root()
        root.mkdir(parents=True, exist_ok=True)
        (root / "images.json").unlink(missing_ok=True)  # until it is whole again
        archive, config = layout / "import.tar", root / "config.toml"
        _write_archive(archive, layout)
        config.write_text(
            f'version = 2\nroot = "{root / "root"}"\nstate = "/run/containerd"\n'
            'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
        )
        env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "CONFIG": str(config),
            "ARCHIVE": str(archive),
            "UNWANTED": " ".join(image for image in have if image not in staying),
        }
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-euc", _ADD]
        title = f"unpack {', '.join(image.removeprefix('localhost/') for image in references)}"
        try:
            progress.run(title, argv, cache.root() / "logs" / "store.log", deadline_s=ADD_DEADLINE_S, env=env)
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)  # half an import is worth nothing; the next build makes it anew
            raise
        (root / "images.json").write_text(json.dumps(staying))


def _write_archive(archive: Path, layout: Path) -> None:
    """The layout as one tar without the blobs that the store has, its images named as containerd reads names."""
    index = json.loads((layout / "index.json").read_text())
    for manifest in index["manifests"]:
        notes = manifest["annotations"]
        notes["io.containerd.image.name"] = notes["org.opencontainers.image.ref.name"]
    (layout / "index.json").write_text(json.dumps(index))
    stored = {blob.name for blob in _blobs().glob("*")}
    with tarfile.open(archive, "w") as tar:
        for name in ("oci-layout", "index.json"):
            tar.add(layout / name, name)
        for blob in sorted((layout / "blobs" / "sha256").iterdir()):
            if blob.name not in stored:
                tar.add(blob, f"blobs/sha256/{blob.name}")


def _blobs() -> Path:
    return _root() / "root" / "io.containerd.content.v1.content" / "blobs" / "sha256"


def _lock() -> Path:
    return _root().with_name(".containerd.lock")


def newest(references: Iterable[str], keep: int) -> list[str]:
    """The last `keep` references of each repository, in the order given."""
    kept: list[str] = []
    count: dict[str, int] = {}
    for reference in reversed(list(references)):
        repository = reference.rsplit(":", 1)[0]
        count[repository] = count.get(repository, 0) + 1
        if count[repository] <= keep:
            kept.insert(0, reference)
    return kept


def copy_to(target: Path) -> None:
    """Give a cluster's containerd, not started yet, its root directory."""
    with cache.lock(_lock()):
        subprocess.run(["cp", "--archive", "--link", str(_root() / "root"), str(target)], check=True, timeout=120)
        for database in target.glob("*/*.db"):
            shared = database.with_suffix(".shared")
            database.rename(shared)
            shutil.copy2(shared, database)
            shared.unlink()
