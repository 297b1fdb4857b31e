"""Writes the CustomResourceDefinitions from the classes of tkcc.api: `python -m tkcc.api.crd --out crds [--check]`.

It turns pydantic's JSON schema into the structural form that the API server wants: nothing but inline objects, no
nulls, and defaults only where they say something (an empty string or list is what absence means anyway).
"""

import argparse
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from tkcc.api.fields import cel, format_duration
from tkcc.api.run import RunSpec, RunStatus
from tkcc.api.spec import Spec
from tkcc.api.status import Status

GROUP = "tkcc.dev"
VERSION = "v1alpha1"

Json = dict[str, Any]

# Of what pydantic says, the keys that a structural schema keeps as they are, in the order they are written.
_KEPT = (
    *("description", "type", "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum"),
    *("minItems", "maxItems", "maxProperties", "required", "x-kubernetes-int-or-string", "x-kubernetes-list-type"),
    *("x-kubernetes-list-map-keys", "x-kubernetes-validations"),
)


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return format_duration(dft) if isinstance(dft, timedelta) else super().encode_default(dft)


def schema_of(cls: type[Any], *, with_defaults: bool) -> Json:
    """Structural schema of a border type."""
    raw = TypeAdapter(cls).json_schema(by_alias=True, schema_generator=_Generator)
    return _structural(raw, raw.get("$defs", {}), with_defaults)


def _structural(node: Json, defs: Mapping[str, Json], with_defaults: bool) -> Json:
    node = _resolved(node, defs)
    out = {key: node[key] for key in _KEPT if key in node}
    if "description" in out:
        out["description"] = " ".join(out["description"].split())
    if node.get("type") == "integer":
        out["format"] = "int64"
    if "properties" in node:
        out["properties"] = {}
        for name, child in sorted(node["properties"].items()):
            part = _structural(child, defs, with_defaults)
            default = _default_of(_resolved(child, defs), part) if with_defaults else None
            out["properties"][name] = part if default is None else part | {"default": default}
    if "items" in node:
        out["items"] = _structural(node["items"], defs, with_defaults)
    if isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _structural(node["additionalProperties"], defs, with_defaults)
    return out


def _resolved(node: Json, defs: Mapping[str, Json]) -> Json:
    """The node with its reference inlined and `or null` dropped; what stands beside a reference wins over it."""
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    assert len(options) <= 1, f"a union has no structural schema: {node}"
    for inner in (*options, *node.get("allOf", ()), node):
        if "$ref" in inner:
            target = defs[inner["$ref"].removeprefix("#/$defs/")]
            node = {**_resolved(target, defs), **_without(node, "$ref", "anyOf", "allOf")}
        elif inner is not node:
            node = {**inner, **_without(node, "anyOf", "allOf")}
    return node


def _without(node: Json, *keys: str) -> Json:
    return {key: value for key, value in node.items() if key not in keys}


def _default_of(node: Json, structural: Json) -> Any:
    """The default worth writing, or None. An object whose parts have defaults defaults to {}, so that they apply; one
    with rules spells them out, because the API server tries its rules on the default as it stands."""
    if structural.get("type") == "object" and "properties" in structural:
        parts = _spelled_out(structural)
        if not parts or structural.get("required"):
            return None
        return parts if "x-kubernetes-validations" in structural else {}
    default = node.get("default")
    return default if default not in ("", 0, [], {}, None) or default is False else None


def _spelled_out(structural: Json) -> Json:
    """The defaults of an object's parts, all the way down."""
    parts = {name: part for name, part in structural["properties"].items() if "default" in part}
    return {
        name: _spelled_out(part) if isinstance(part["default"], dict) else part["default"]
        for name, part in parts.items()
    }


def _column(name: str, path: str, type_: str = "string", *, wide: bool = False, description: str = "") -> Json:
    column: Json = {"name": name, "type": type_, "jsonPath": path}
    if wide:
        column["priority"] = 1
    if description:
        column["description"] = description
    return column


def _condition(type_: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{type_}")].{part}'


def _crd(kind: str, plural: str, short: str, spec: Json, status: Json, columns: list[Json], **extra: Any) -> Json:
    schema: Json = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        **extra.pop("rules", {}),
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, **extra.pop("subresources", {})},
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["tkcc"],
            },
            "versions": [version],
        },
    }


def inference_deployment_crd() -> Json:
    return _crd(
        "InferenceDeployment",
        "inferencedeployments",
        "infdep",
        schema_of(Spec, with_defaults=True),
        schema_of(Status, with_defaults=False),
        [
            _column("Ready", _condition("Ready", "status")),
            _column("Reason", _condition("Ready", "reason")),
            _column("Model", ".spec.model.name"),
            _column("Engine", ".spec.engine.type"),
            _column("Revision", ".status.stable.name"),
            _column("Drift", _condition("TrafficDrifted", "status")),
            _column("Recompiling", _condition("Recompiling", "reason")),
            _column("Weight", ".status.rollout.observedWeight", "integer", description="Canary's share in percent."),
            _column("Speedup", ".status.stable.speedup", description="Against the built-in forward pass."),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("Phase", ".status.phase", wide=True),
            _column(
                "Prompt", ".status.drift.longPromptTokens", "integer", wide=True, description="Mean prompt tokens."
            ),
            _column("HitMilli", ".status.drift.longHitRatioMilli", "integer", wide=True),
            _column("Run", ".status.recompilation.activeRun", wide=True),
            _column("Message", _condition("Ready", "message"), wide=True),
        ],
        subresources={
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            }
        },
        # Names of owned objects are NAME-stable, NAME-<run id>-slow and the like, and must stay DNS labels; that of a
        # Service, which is NAME itself, begins with a letter.
        rules=cel(
            ("self.metadata.name.size() <= 40", "metadata.name must have at most 40 characters"),
            (
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must begin with a letter and have only a-z, 0-9 and - in it: a Service gets this name",
            ),
        ),
    )


def recompilation_run_crd() -> Json:
    spec = schema_of(RunSpec, with_defaults=True)
    spec |= cel(("self == oldSelf", "the spec of a RecompilationRun cannot change; each run is made anew"))
    return _crd(
        "RecompilationRun",
        "recompilationruns",
        "rrun",
        spec,
        schema_of(RunStatus, with_defaults=False),
        [
            _column("Deployment", ".spec.deployment"),
            _column("Succeeded", _condition("Succeeded", "status")),
            _column("Reason", _condition("Succeeded", "reason")),
            _column("Tier", ".status.tier"),
            _column("Evaluated", ".status.candidates.evaluated", "integer"),
            _column("Accepted", ".status.candidates.accepted", "integer"),
            _column("Refused", ".status.candidates.refused", "integer"),
            _column("GainMilli", ".status.gainMilli", "integer", description="Against the incumbent, thousandths."),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("Trigger", ".spec.trigger", wide=True),
            _column("Prompt", ".spec.workload.promptTokens.mean", "integer", wide=True),
            _column("HitMilli", ".spec.workload.hitRatioMilli", "integer", wide=True),
            _column("Artifact", ".status.artifact", wide=True),
            _column("Message", _condition("Succeeded", "message"), wide=True),
        ],
    )


def render() -> dict[str, str]:
    """File name to YAML text, for every CRD."""
    import yaml  # a tool for developers: the operator never writes YAML

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    crds = (inference_deployment_crd(), recompilation_run_crd())
    head = "# Made from tkcc.api by `python -m tkcc.api.crd --out crds`; change the classes, not this file.\n"
    return {
        f"{crd['spec']['names']['plural']}.yaml": head
        + yaml.dump(crd, Dumper=Plain, sort_keys=False, width=120, allow_unicode=True)
        for crd in crds
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tkcc.api.crd", description="Write or check the CRDs.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the YAML files")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is stale")
    args = parser.parse_args(argv)
    stale = []
    for name, text in render().items():
        path = args.out / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(str(path))
        if not args.check:
            args.out.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if args.check and stale:
        print(f"stale: {', '.join(stale)}; run `python -m tkcc.api.crd --out {args.out}`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
