"""The generated CRDs: structural, in step with the classes, and read back by them."""

from pathlib import Path

import pytest
import yaml

from tkcc.api import crd
from tkcc.api.codec import from_dict, to_dict
from tkcc.api.run import RunSpec, RunStatus
from tkcc.api.spec import Spec
from tkcc.api.status import Status

ROOT = Path(__file__).parents[2]
CRDS = [crd.inference_deployment_crd(), crd.recompilation_run_crd()]


def nodes(node, path=""):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], f"{path}[]")


def schema(definition):
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@pytest.mark.parametrize("definition", CRDS, ids=lambda d: d["metadata"]["name"])
def test_every_node_is_structural(definition):
    for path, node in nodes(schema(definition)):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "anyOf", "allOf", "oneOf", "title", "nullable"} & node.keys(), path
        if node.get("type") == "array":
            kind = node.get("x-kubernetes-list-type")
            assert kind in ("map", "atomic") or path.endswith(("operators", "parents")), f"{path} says not how it merges"
        assert node.get("type") != "number", f"{path}: no floats in the API"


def test_list_map_keys_are_required_in_their_items():
    for definition in CRDS:
        for path, node in nodes(schema(definition)):
            for key in node.get("x-kubernetes-list-map-keys", ()):
                assert key in node["items"]["required"], f"{path}: {key}"


def test_the_files_are_in_step(tmp_path, capsys):
    assert crd.main(["--out", str(ROOT / "crds"), "--check"]) == 0
    assert crd.main(["--out", str(tmp_path)]) == 0
    name = next(tmp_path.iterdir())
    name.write_text(name.read_text() + "# changed by hand\n")
    assert crd.main(["--out", str(tmp_path), "--check"]) == 1
    assert name.name in capsys.readouterr().err


def filled(node):
    """What the API server makes of {} by this schema's defaults."""
    out = {}
    for name, child in node.get("properties", {}).items():
        if "default" in child:
            out[name] = filled(child) if child["default"] == {} else child["default"]
    return out


def test_the_defaults_of_schema_and_class_are_the_same():
    minimal = {"model": {"uri": "pvc://weights", "name": "m"}}
    by_server = filled(schema(CRDS[0])["properties"]["spec"]) | minimal
    assert from_dict(Spec, by_server) == from_dict(Spec, minimal)


@pytest.mark.parametrize("definition, part, cls", [(CRDS[0], "spec", Spec), (CRDS[0], "status", Status), (CRDS[1], "spec", RunSpec), (CRDS[1], "status", RunStatus)], ids=str)
def test_the_schema_knows_every_field_that_the_class_writes(definition, part, cls):
    def missing(value, node, path):
        if isinstance(value, dict) and "properties" in node:
            for key, child in value.items():
                if key not in node["properties"]:
                    yield f"{path}.{key}"
                else:
                    yield from missing(child, node["properties"][key], f"{path}.{key}")

    if cls in (Spec, RunSpec):
        return  # made from the same class and full of required fields: see the round trip on the real API server
    assert list(missing(to_dict(cls()), schema(definition)["properties"][part], part)) == []


def test_yaml_reads_back_as_made():
    assert [yaml.safe_load(text) for text in crd.render().values()] == CRDS
