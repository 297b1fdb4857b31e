"""The artifact ConfigMap: made of a run's result after its digest was checked, read back with the same suspicion."""

from tkcc.api.candidate import Artifact, candidate_digest
from tkcc.api.codec import from_json
from tkcc.api.fields import BASELINE
from tkcc.kube.resources import CONFIG_MAP, JsonObject
from tkcc.shell.render.names import ARTIFACT_LABEL, Owner, artifact_name, labels, owned

COMPONENT = "artifact"
_KEYS = ("manifest.json", "candidate.py", "report.json")


class ArtifactError(ValueError):
    """What claims to be an artifact is not: the message says what does not fit."""


def checked_manifest(data: dict[str, str]) -> Artifact:
    """The manifest, if the source beside it has the digest that the manifest claims. Raises ArtifactError."""
    missing = [key for key in ("manifest.json", "candidate.py") if key not in data]
    if missing:
        raise ArtifactError(f"{', '.join(missing)} is missing")
    try:
        manifest = from_json(Artifact, data["manifest.json"])
    except ValueError as err:
        raise ArtifactError(f"manifest.json: {err}") from err
    actual = candidate_digest(data["candidate.py"], manifest.params)
    if actual != manifest.digest:
        raise ArtifactError(f"candidate.py has digest {actual[:16]}, its manifest claims {manifest.digest[:16]}")
    return manifest


def artifact(owner: Owner, digest: str, data: dict[str, str]) -> JsonObject:
    """The immutable ConfigMap of a result whose digest is right. Raises ArtifactError."""
    if digest == BASELINE:
        raise ArtifactError("the baseline revision is built in; it has no artifact")
    manifest = checked_manifest(data)
    if manifest.digest != digest:
        raise ArtifactError(f"the result holds {manifest.digest[:16]}, not {digest[:16]}")
    return owned(
        CONFIG_MAP,
        owner,
        artifact_name(digest),
        labels(owner.name, COMPONENT, {ARTIFACT_LABEL: digest[:16]}),
        immutable=True,
        data={key: data[key] for key in _KEYS if key in data},
    )
