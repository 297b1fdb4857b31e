"""The images of the local cluster: built from the shipped Dockerfiles by buildah, kept as docker-archive files.

No registry: `Cluster.load` hands the files to containerd. An image's tag is a digest of all that goes into it (its
Dockerfile, the staged sources, the base, the build arguments), so an image that exists is never built again.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import cache, node, progress, toolchain
from e2e.cluster.errors import ClusterError

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
SUITE = "bookworm"  # its Python is 3.11, so a virtual environment's 3.11 packages can be mounted
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
UNREAD = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
SOURCES = ("pyproject.toml", "images", "tkcc", "operator")
KEEP_ARCHIVES = 2  # of each image: the one in use and the one before


@dataclass(frozen=True)
class Image:
    """One built image: the reference that pods name, and the archive that holds it."""

    reference: str
    archive: Path


def build_all(*, torch: str = "mounted") -> dict[str, Image]:
    """Operator, worker and engine; `torch` is the engine's build argument TORCH: `mounted` or `pip`."""
    return {
        "operator": build("operator"),
        "worker": build("worker"),
        "engine": build("engine", {"TORCH": torch}),
    }


def build(name: str, arguments: dict[str, str] | None = None) -> Image:
    """Build images/NAME.Dockerfile over the base image, unless an image of just these inputs exists."""
    arguments = arguments or {}
    dockerfile = REPOSITORY / "images" / f"{name}.Dockerfile"
    if not dockerfile.exists():
        raise ClusterError(f"no image {name!r}: {dockerfile} does not exist")
    with tempfile.TemporaryDirectory(prefix="tkcc-context-") as staging:
        context = Path(staging)
        staged = _stage(context)
        given = [f"{key}={value}" for key, value in sorted(arguments.items())]
        tag = cache.digest(cache.digest_files(context, staged), dockerfile.read_bytes(), _base_key(), *given)
        reference = f"localhost/tkcc-{name}:{tag}"
        arguments = {"BASE": base().reference, **arguments}
        return _archive(reference, lambda: _bud(reference, dockerfile, context, arguments))


def pause_archive() -> Path:
    """The image of every pod's sandbox; its tag is fixed because containerd's configuration names it."""
    program = toolchain.pause_program()
    key = cache.digest(program.read_bytes(), (HERE / "pause" / "Dockerfile").read_bytes())
    path = _archives() / f"pause-{key}.tar"
    with tempfile.TemporaryDirectory(prefix="tkcc-context-") as staging:
        shutil.copy2(program, staging)
        dockerfile = HERE / "pause" / "Dockerfile"
        return _write_archive(path, node.PAUSE_IMAGE, lambda: _bud(node.PAUSE_IMAGE, dockerfile, Path(staging), {}))


def _stage(context: Path) -> list[Path]:
    """Copy what an image may take to `context`: what is hashed is then what is built, whatever is edited meanwhile."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "*.so", "build")
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, context / name, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, context / name)
    return [path for path in context.rglob("*") if path.is_file()]


def _base_key() -> str:
    return cache.digest(SUITE, *BASE_PACKAGES, *UNREAD)


def base() -> Image:
    """Debian with Python, from packages alone."""
    reference = f"localhost/tkcc-base:{_base_key()}"
    return _archive(reference, lambda: _build_base(reference))


def _build_base(reference: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tkcc-base-") as staging:
        rootfs = Path(staging) / "rootfs.tar"
        argv = ["mmdebstrap", "--variant=apt", "--mode=root", f"--include={','.join(BASE_PACKAGES)}"]
        argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in UNREAD]
        argv += ["--dpkgopt=force-unsafe-io", SUITE, str(rootfs)]
        progress.run(f"unpack Debian {SUITE} with Python", argv, _log("base-rootfs"), deadline_s=900)
        dockerfile = Path(staging) / "Dockerfile"
        dockerfile.write_text('FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n')
        _bud(reference, dockerfile, Path(staging), {})


def _bud(reference: str, dockerfile: Path, context: Path, arguments: dict[str, str]) -> None:
    argv = [*_buildah("build"), "--isolation=chroot", "--network=host", "--layers", f"--tag={reference}"]
    argv += ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]  # pip and apt in the build trust whom the host trusts
    argv += [f"--build-arg={key}={value}" for key, value in arguments.items()]
    argv += [f"--file={dockerfile}", str(context)]
    progress.run(f"build image {reference}", argv, _log(f"image-{dockerfile.stem}"), deadline_s=1800)


def _archive(reference: str, build_image: Callable[[], None]) -> Image:
    name, tag = reference.removeprefix("localhost/tkcc-").split(":")
    path = _archives() / f"{name}-{tag}.tar"
    return Image(reference, _write_archive(path, reference, build_image))


def _write_archive(path: Path, reference: str, build_image: Callable[[], None]) -> Path:
    with cache.lock(path.with_name(".lock")):
        if not path.exists():
            build_image()
            partial = path.with_name(f".{path.name}.partial")
            partial.unlink(missing_ok=True)
            argv = [*_buildah("push"), reference, f"docker-archive:{partial}:{reference}"]
            progress.run(f"write {path.name}", argv, _log("write-archive"), deadline_s=300)
            partial.rename(path)
            _prune(path)
    return path


def _prune(newest: Path) -> None:
    """Keep the last few archives of an image; older ones go, and their image from buildah's store."""
    name = newest.name.rsplit("-", 1)[0]
    archives = sorted(newest.parent.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)
    for old in archives[:-KEEP_ARCHIVES]:
        old.unlink()


def _archives() -> Path:
    directory = cache.root() / "images"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _buildah(command: str) -> list[str]:
    store = cache.root() / "buildah"
    return ["buildah", f"--root={store / 'root'}", f"--runroot={store / 'run'}", "--storage-driver=overlay", command]


def _log(name: str) -> Path:
    return cache.root() / "logs" / f"{name}.log"
