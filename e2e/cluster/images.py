"""The images of the local cluster: which there are, and what goes into each.

There is no registry: a new cluster has what is in the store. An image's tag is a digest of all that goes into it (its
Dockerfile, the staged sources, the base, the build arguments), so an image that exists is never built again.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from e2e.cluster import buildah, cache, store, toolchain
from e2e.cluster.buildah import Build

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
# What each image takes from the repository, beside its Dockerfile.
SOURCES = {
    "operator": ("requirements/operator.txt", "operator", "tkcc"),
    "worker": ("requirements/operator.txt", "requirements/agents.txt", "tkcc"),
    "engine": ("requirements/engine.txt", "tkcc"),
}
KEEP_IMAGES = 2  # of each name: the one in use and the one before


def build_all(*, torch: str = "mounted") -> dict[str, str]:
    """References of operator, worker and engine; they, and what pods need beside them, are built where missing.

    `torch` is the engine's build argument TORCH: `mounted` or `pip`.
    """
    arguments: dict[str, dict[str, str]] = {"operator": {}, "worker": {}, "engine": {"TORCH": torch}}
    with tempfile.TemporaryDirectory(prefix="tkcc-context-") as staging:
        builds = {name: _plan(name, Path(staging) / name, given) for name, given in arguments.items()}
        if _missing([pause_reference(), *(build.reference for build in builds.values())]):
            _build([_plan_pause(Path(staging) / "pause"), *builds.values()])
    return {name: build.reference for name, build in builds.items()}


def pause_reference() -> str:
    """The image of every pod's sandbox."""
    dockerfile = HERE / "pause" / "Dockerfile"
    return f"localhost/tkcc-pause:{cache.digest(toolchain.pause_key(), dockerfile.read_bytes())}"


def _missing(references: list[str]) -> list[str]:
    stored = store.images()
    return [reference for reference in references if reference not in stored]


def _build(builds: list[Build]) -> None:
    """Build what the store lacks, one after the other, and unpack it all at once."""
    with buildah.session(), store.layout() as layout:
        wanted = _missing([build.reference for build in builds])  # again: another may have built while we waited
        buildah.make_base()
        for build in builds:
            if build.reference in wanted:
                buildah.build(replace(build, arguments={"BASE": buildah.BASE, **build.arguments}))
                buildah.write(build.reference, layout)
        if wanted:
            store.add(layout, wanted, keep=KEEP_IMAGES)
            buildah.keep_only(store.images())


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
    given = [f"{key}={value}" for key, value in sorted(arguments.items())]
    tag = cache.digest(name, files, buildah.BASE_KEY, *given)
    return Build(f"localhost/tkcc-{name}:{tag}", context / "images" / f"{name}.Dockerfile", context, arguments)


def _plan_pause(context: Path) -> Build:
    context.mkdir()
    shutil.copy2(toolchain.pause_program(), context)
    return Build(pause_reference(), HERE / "pause" / "Dockerfile", context, {})
