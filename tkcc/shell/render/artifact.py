"""The artifact ConfigMap, made of a run's result after its digest was checked."""

from tkcc.api.candidate import parse_artifact
from tkcc.api.fields import BASELINE
from tkcc.kube.resources import CONFIG_MAP, JsonObject
from tkcc.shell.render.names import ARTIFACT_LABEL, Owner, artifact_name, labels, owned

COMPONENT = "artifact"
_KEYS = ("manifest.json", "candidate.py", "report.json")


def artifact(owner: Owner, digest: str, data: dict[str, str]) -> JsonObject:
    """The immutable ConfigMap of a result whose digest is right. Raises ValueError that says what does not fit."""
    if digest == BASELINE:
        raise ValueError("the baseline revision is built in; it has no artifact")
    manifest, _ = parse_artifact(data)
    if manifest.digest != digest:
        raise ValueError(f"the result holds {manifest.digest[:16]}, not {digest[:16]}")
    return owned(
        CONFIG_MAP,
        owner,
        artifact_name(digest),
        labels(owner.name, COMPONENT, {ARTIFACT_LABEL: digest[:16]}),
        immutable=True,
        data={key: data[key] for key in _KEYS if key in data},
    )
