"""buildah with a store of its own in the cache, and the one image that is not built from a Dockerfile of the project.

Each command runs in a mount namespace of its own: one that is killed leaves no mount on the host. All of it is for one
user at a time, under `session`.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import cache, progress

SUITE = "bookworm"  # its Python is 3.11, so a virtual environment's 3.11 packages can be mounted
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
UNREAD = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
BASE_KEY = cache.digest(SUITE, *BASE_PACKAGES, *UNREAD)
BASE = f"localhost/tkcc-base:{BASE_KEY}"
_OWN_MOUNTS = ("unshare", "--mount", "--propagation=slave")


@dataclass(frozen=True)
class Build:
    """One image to be built; the tag of `reference` is a digest of all that goes into it."""

    reference: str
    dockerfile: Path
    context: Path
    arguments: Mapping[str, str]


@contextmanager
def session() -> Iterator[None]:
    """Hold buildah's store, and drop first what a build that was killed left in it."""
    with cache.lock(cache.root() / "images.lock"):
        shutil.rmtree(_own() / "run", ignore_errors=True)  # mounts that it counts are gone with their namespace
        progress.output(_buildah("rm", "--all"), deadline_s=60)
        yield


def build(build: Build) -> None:
    """Run a Dockerfile; layers that are as before come from the store."""
    argv = _buildah("build", "--isolation=chroot", "--network=host", "--layers", f"--tag={build.reference}")
    argv += ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]  # pip and apt in the build trust whom the host trusts
    argv += [f"--build-arg={key}={value}" for key, value in build.arguments.items()]
    argv += [f"--file={build.dockerfile}", str(build.context)]
    progress.run(f"build image {build.reference}", argv, _log(f"image-{build.dockerfile.stem}"), deadline_s=1800)


def write(reference: str, layout: Path) -> None:
    """Add an image to an OCI layout; blobs that are there already are not written again.

    By skopeo, because `buildah push` compresses whatever it is told, which takes longer than all the rest.
    """
    source = f"containers-storage:[overlay@{_own() / 'root'}+{_own() / 'run'}]{reference}"
    argv = [*_OWN_MOUNTS, "skopeo", "copy", "--dest-oci-accept-uncompressed-layers", source]
    argv.append(f"oci:{layout}:{reference}")
    progress.run(f"write image {reference}", argv, _log("write-image"), deadline_s=300)


def make_base() -> None:
    """BASE, Debian with Python and no more, from packages, where it is missing."""
    known = subprocess.run(_buildah("inspect", "--type=image", BASE), capture_output=True, timeout=60, check=False)
    if known.returncode == 0:
        return
    with tempfile.TemporaryDirectory(prefix="tkcc-base-") as staging:
        rootfs = Path(staging) / "rootfs.tar"
        argv = [*_OWN_MOUNTS, "mmdebstrap", "--variant=apt", "--mode=root", f"--include={','.join(BASE_PACKAGES)}"]
        argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in UNREAD]
        argv += ["--dpkgopt=force-unsafe-io", SUITE, str(rootfs)]
        progress.run(f"unpack Debian {SUITE} with Python", argv, _log("base-rootfs"), deadline_s=900)
        dockerfile = Path(staging) / "Dockerfile"
        dockerfile.write_text('FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n')
        build(Build(BASE, dockerfile, Path(staging), {}))


def keep_only(references: Sequence[str]) -> None:
    """Remove the project's images that are not among these; the layers under those that stay remain as the cache."""
    names = progress.output(_buildah("images", "--format={{.Name}}:{{.Tag}}", "--filter=reference=localhost/tkcc-*"))
    old = [name for name in names.split() if name not in (*references, BASE)]
    if old:
        progress.output(_buildah("rmi", *old), deadline_s=120)


def _buildah(*words: str) -> list[str]:
    store = [f"--root={_own() / 'root'}", f"--runroot={_own() / 'run'}", "--storage-driver=overlay"]
    return [*_OWN_MOUNTS, "buildah", *store, *words]


def _own() -> Path:
    return cache.root() / "buildah"


def _log(name: str) -> Path:
    return cache.root() / "logs" / f"{name}.log"
