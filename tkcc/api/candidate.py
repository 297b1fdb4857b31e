"""A proposed forward pass and, once it was accepted, its artifact: both addressed by digest.

The digest covers the source text and the parameters, nothing else: the same code proposed twice is the same
candidate, whoever proposed it. An artifact's files are read here and nowhere else: what does not match its digest is
refused by whoever reads it.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER, canonical_json, from_json, sha256_hex
from tkcc.api.workload import Workload

_ARTIFACT_FILES = ("manifest.json", "candidate.py")


def candidate_digest(source: str, params: dict[str, int | str | bool]) -> str:
    """SHA-256 hex over the source (newlines normalised, trailing blanks cut) and the canonical parameters."""
    lines = [line.rstrip() for line in source.replace("\r\n", "\n").split("\n")]
    return sha256_hex(canonical_json({"source": "\n".join(lines).strip() + "\n", "params": params}))


@dataclass(frozen=True, config=BORDER)
class Candidate:
    """One Python module with `build(spec, weights, cells) -> ForwardPass` (see tkcc.models.forward)."""

    source: str
    params: dict[str, int | str | bool]  # read by the module as `spec.params`
    hypothesis: str = ""  # why it should be faster: for people
    parents: tuple[str, ...] = ()  # digests
    operators: tuple[str, ...] = ()  # names of the rewrite operators that made it

    @property
    def digest(self) -> str:
        return candidate_digest(self.source, self.params)


@dataclass(frozen=True, config=BORDER)
class Artifact:
    """The manifest of an accepted candidate. In the cluster: an immutable ConfigMap `tkcc-artifact-<digest[:16]>` with
    the keys `manifest.json` (this), `candidate.py` (the source) and `report.json` (the campaign's)."""

    digest: str
    params: dict[str, int | str | bool]
    model_digest: str  # of the weights and configuration it was judged on
    engine_version: str
    device: str  # "cpu: <model name>" or the GPU's name
    dtype: str
    workload: Workload
    workload_digest: str
    verdict: str  # "Pass"; "Unjudged" for one made by hand
    judge_version: str
    judge_source_hash: str
    traffic_source: str  # Recording.source
    parent: str = ""  # digest of the incumbent it beat
    hypothesis: str = ""
    gain_milli: int = 0  # time saved per output token against the baseline revision, thousandths


def parse_artifact(files: Mapping[str, str]) -> tuple[Artifact, Candidate]:
    """The manifest, and the candidate that it is about. Raises ValueError where they are missing or do not match."""
    missing = [name for name in _ARTIFACT_FILES if name not in files]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    try:
        manifest = from_json(Artifact, files["manifest.json"])
    except ValueError as err:
        raise ValueError(f"manifest.json is {err}") from err
    candidate = Candidate(files["candidate.py"], manifest.params)
    if candidate.digest != manifest.digest:
        raise ValueError(
            f"candidate.py and its parameters have digest {candidate.digest[:16]}, the manifest says"
            f" {manifest.digest[:16]}"
        )
    return manifest, candidate


def read_artifact(directory: Path) -> tuple[Artifact, Candidate]:
    """The same, of files in a directory. Raises OSError too."""
    files = {}
    for name in _ARTIFACT_FILES:
        try:
            files[name] = (directory / name).read_bytes().decode()  # not read_text: a newline is part of the source
        except UnicodeDecodeError:
            raise ValueError(f"{name} is not UTF-8 text") from None
    return parse_artifact(files)
