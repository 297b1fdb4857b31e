"""The images of the local cluster, built from the shipped Dockerfiles by buildah and unpacked into the store.

There is no registry: a new cluster has what is in the store. An image's tag is a digest of all that goes into it (its
Dockerfile, the staged sources, the base, the build arguments), so an image that exists is never built again.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from e2e.cluster import cache, node, progress, store, toolchain

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
SUITE = "bookworm"  # its Python is 3.11, so a virtual environment's 3.11 packages can be mounted
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
UNREAD = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
# What each image takes from the repository, beside its Dockerfile.
SOURCES = {
    "operator": ("requirements/operator.txt", "operator", "tkcc"),
    "worker": ("requirements/operator.txt", "requirements/agents.txt", "tkcc"),
    "engine": ("requirements/engine.txt", "tkcc"),
}
KEEP_IMAGES = 2  # of each name: the one in use and the one before


@dataclass(frozen=True)
class Build:
    """One image to be built: `reference` ends in a digest of everything else here, and of the context's files."""

    reference: str
    dockerfile: Path
    context: Path
    arguments: Mapping[str, str]


def build_all(*, torch: str = "mounted") -> dict[str, str]:
    """References of operator, worker and engine, built where the store lacks them.

    `torch` is the engine's build argument TORCH: `mounted` or `pip`.
    """
    arguments = {"operator": {}, "worker": {}, "engine": {"TORCH": torch}}
    with tempfile.TemporaryDirectory(prefix="tkcc-context-") as staging:
        builds = {name: _plan(name, Path(staging) / name, given) for name, given in arguments.items()}
        if any(build.reference not in store.images() for build in builds.values()):
            of_base = {"BASE": base()}
            _add([replace(build, arguments={**of_base, **build.arguments}) for build in builds.values()])
    return {name: build.reference for name, build in builds.items()}


def _plan(name: str, context: Path, arguments: Mapping[str, str]) -> Build:
    """Stage what an image takes: what is hashed is then what is built, whatever is edited meanwhile."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "*.so", "build")
    for source in (f"images/{name}.Dockerfile", *SOURCES[name]):
        (context / source).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, context / source, ignore=ignore)
        else:
            shutil.copy2(REPOSITORY / source, context / source)
    files = cache.digest_files(context, [path for path in context.rglob("*") if path.is_file()])
    tag = cache.digest(name, files, _base_key(), *(f"{key}={value}" for key, value in sorted(arguments.items())))
    dockerfile = context / "images" / f"{name}.Dockerfile"
    return Build(f"localhost/tkcc-{name}:{tag}", dockerfile, context, arguments)


def build_pause() -> None:
    """The image of every pod's sandbox; its tag is fixed because containerd's configuration names it."""
    with tempfile.TemporaryDirectory(prefix="tkcc-context-") as staging:
        shutil.copy2(toolchain.pause_program(), staging)
        _add([Build(node.PAUSE_IMAGE, HERE / "pause" / "Dockerfile", Path(staging), {})])


def _add(builds: Iterable[Build]) -> None:
    """Build what the store lacks, one after the other, and unpack it all at once."""
    with cache.lock(cache.root() / "images.lock"), store.layout() as layout:
        wanted = [build for build in builds if build.reference not in store.images()]
        for build in wanted:
            _bud(build)
            argv = [*_buildah("push"), "--disable-compression", build.reference, f"oci:{layout}:{build.reference}"]
            progress.run(f"write image {build.reference}", argv, _log("write-image"), deadline_s=300)
        if wanted:
            store.add(layout, [build.reference for build in wanted], keep=KEEP_IMAGES)
            _forget_old()


def _base_key() -> str:
    return cache.digest(SUITE, *BASE_PACKAGES, *UNREAD)


def base() -> str:
    """The reference, in buildah's store, of Debian with Python and no more; made from packages where it is missing."""
    reference = f"localhost/tkcc-base:{_base_key()}"
    with cache.lock(cache.root() / "buildah" / ".base.lock"):
        if not _is_stored(reference):
            _build_base(reference)
    return reference


def _is_stored(reference: str) -> bool:
    argv = [*_buildah("inspect"), "--type=image", reference]
    return subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 0


def _build_base(reference: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tkcc-base-") as staging:
        rootfs = Path(staging) / "rootfs.tar"
        argv = ["mmdebstrap", "--variant=apt", "--mode=root", f"--include={','.join(BASE_PACKAGES)}"]
        argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in UNREAD]
        argv += ["--dpkgopt=force-unsafe-io", SUITE, str(rootfs)]
        progress.run(f"unpack Debian {SUITE} with Python", argv, _log("base-rootfs"), deadline_s=900)
        dockerfile = Path(staging) / "Dockerfile"
        dockerfile.write_text('FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n')
        _bud(Build(reference, dockerfile, Path(staging), {}))


def _bud(build: Build) -> None:
    argv = [*_buildah("build"), "--isolation=chroot", "--network=host", "--layers", f"--tag={build.reference}"]
    argv += ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]  # pip and apt in the build trust whom the host trusts
    argv += [f"--build-arg={key}={value}" for key, value in build.arguments.items()]
    argv += [f"--file={build.dockerfile}", str(build.context)]
    progress.run(f"build image {build.reference}", argv, _log(f"image-{build.dockerfile.stem}"), deadline_s=1800)


def _forget_old() -> None:
    """Remove from buildah's store the images that ours no longer has; the layers under the newest stay as its cache."""
    argv = [*_buildah("images"), "--format={{.Name}}:{{.Tag}}", "--filter=reference=localhost/tkcc-*"]
    staying = {*store.images(), f"localhost/tkcc-base:{_base_key()}"}
    old = [name for name in progress.output(argv).split() if name not in staying]
    if old:
        progress.output([*_buildah("rmi"), *old], deadline_s=120)


def _buildah(command: str) -> list[str]:
    own = cache.root() / "buildah"
    return ["buildah", f"--root={own / 'root'}", f"--runroot={own / 'run'}", "--storage-driver=overlay", command]


def _log(name: str) -> Path:
    return cache.root() / "logs" / f"{name}.log"
