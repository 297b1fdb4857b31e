"""The generated CRDs: structural, in step with the classes, and read back by them."""

from pathlib import Path

import pytest
import yaml

from tkcc.api import crd
from tkcc.api.codec import from_dict, to_dict
from tkcc.api.run import RunStatus
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
            assert kind in ("map", "atomic") or path.endswith(("operators", "parents")), (
                f"{path} says not how it merges"
            )
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


def filled(node, given):
    """What the API server makes of `given` by this schema's defaults."""
    out = dict(given)
    for name, child in node.get("properties", {}).items():
        if name not in out and "default" in child:
            out[name] = child["default"]
        if isinstance(out.get(name), dict):
            out[name] = filled(child, out[name])
    return out


def test_the_defaults_of_schema_and_class_are_the_same():
    minimal = {"model": {"uri": "pvc://weights", "name": "m"}}
    by_server = filled(schema(CRDS[0])["properties"]["spec"], minimal)
    assert by_server["rollout"]["analysis"]["interval"] == "30s"
    assert from_dict(Spec, by_server) == from_dict(Spec, minimal)


def unknown(value, node, path):
    """Paths of a value that the schema would prune."""
    if isinstance(value, list):
        for item in value:
            yield from unknown(item, node["items"], f"{path}[]")
    if isinstance(value, dict) and "properties" in node:
        for key, child in value.items():
            if key in node["properties"]:
                yield from unknown(child, node["properties"][key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"


@pytest.mark.parametrize(
    "definition, value", [(CRDS[0], Status()), (CRDS[1], RunStatus())], ids=["Status", "RunStatus"]
)
def test_nothing_that_is_written_is_pruned(definition, value):
    assert list(unknown(to_dict(value), schema(definition)["properties"]["status"], "status")) == []


def test_an_object_whose_rules_read_its_defaults_spells_them_out():
    """The API server tries a rule on the default as it stands, before the defaults inside it apply."""
    for definition in CRDS:
        for path, node in nodes(schema(definition)):
            if "x-kubernetes-validations" in node and isinstance(node.get("default"), dict):
                assert node["default"] == filled(node, {}), path


def test_yaml_reads_back_as_made():
    assert [yaml.safe_load(text) for text in crd.render().values()] == CRDS
