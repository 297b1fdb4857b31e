"""From source text to a forward pass: candidates, artifact directories, and the baseline revision's own digest.

It decides what an artifact must match before it may serve: its digest, the model's weights and the dtype. Whether the
code in it is any good was the judge's matter.
"""

import inspect
import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from tkcc.api.candidate import Artifact, Candidate, read_artifact
from tkcc.models import llama
from tkcc.models.forward import Build

MAX_SOURCE_BYTES = 900_000  # a ConfigMap holds 1 MiB in all


class ArtifactError(Exception):
    """The artifact is unreadable, or made for something else. The message names what does not match."""


@cache
def baseline() -> Candidate:
    """The built-in forward pass as a candidate: its digest is made of its source like any other."""
    return Candidate(inspect.getsource(llama), {})


def baseline_digest() -> str:
    return baseline().digest


def load_candidate(source: str, params: Mapping[str, int | str | bool]) -> Build:
    """Run a candidate's module and return its `build`. This executes the source: containment is the caller's.

    Raises ArtifactError when the module cannot be imported or defines no `build`.
    """
    candidate = Candidate(source, dict(params))
    name = f"tkcc_candidate_{candidate.digest[:16]}"
    filename = f"<candidate {candidate.digest[:16]}>"
    try:
        code = compile(source, filename, "exec")
        # Triton and tracebacks ask for source lines; mtime None keeps checkcache from dropping them.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        module = ModuleType(name)
        module.__file__ = filename
        sys.modules[name] = module  # dataclasses, pickle and Inductor look the module up by name
        exec(code, module.__dict__)
    except Exception as err:  # whatever a foreign module raises
        sys.modules.pop(name, None)
        raise ArtifactError(f"candidate {candidate.digest[:16]} does not import: {type(err).__name__}: {err}") from err
    build = getattr(module, "build", None)
    if not callable(build):
        raise ArtifactError(f"candidate {candidate.digest[:16]} defines no function `build(spec, weights, cells)`")
    loaded: Build = build
    return loaded


@dataclass(frozen=True, slots=True)
class LoadedArtifact:
    """An artifact directory that was read and whose source matches its digest. Nothing of it has been run."""

    manifest: Artifact
    source: str

    def build(self) -> Build:
        """Run the module. Raises ArtifactError."""
        return load_candidate(self.source, self.manifest.params)


def load_artifact(artifact_dir: Path | str) -> LoadedArtifact:
    """Read manifest.json and candidate.py. Raises ArtifactError when they are missing, bad, or do not match."""
    directory = Path(artifact_dir)
    try:
        manifest, candidate = read_artifact(directory)
    except OSError as err:
        raise ArtifactError(f"artifact {directory}: {err.strerror}: {err.filename}") from err
    except ValueError as err:
        raise ArtifactError(f"artifact {directory}: {err}") from err
    num_bytes = len(candidate.source.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise ArtifactError(f"artifact {directory}: candidate.py has {num_bytes} bytes, at most {MAX_SOURCE_BYTES}")
    return LoadedArtifact(manifest, candidate.source)


def check_artifact(manifest: Artifact, model_digest: str, dtype: str) -> None:
    """Refuse an artifact judged on other weights or another dtype. Raises ArtifactError that says what to change."""
    if manifest.model_digest != model_digest:
        raise ArtifactError(
            f"artifact {manifest.digest[:16]} was judged on model {manifest.model_digest[:16]}, this is model"
            f" {model_digest[:16]}"
        )
    if manifest.dtype != dtype:
        raise ArtifactError(
            f"artifact {manifest.digest[:16]} was judged in {manifest.dtype}, not {dtype}:"
            f" pass --dtype {manifest.dtype}"
        )
