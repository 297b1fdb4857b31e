"""The example manifests: valid, complete, and true about the defaults."""

from pathlib import Path

import pytest
import yaml

from tkcc.api.codec import from_dict, to_dict
from tkcc.api.spec import Spec
from tkcc.control.steps import steps_of

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = [EXAMPLES / "full.yaml", EXAMPLES / "smollm2.yaml"]
# Where the full example shows something other than the default, for a reader's sake.
SHOWN = {"model", "replicas", "pod", "traffic", "rollout.steps", "recompilation.tiers"}


def load(path):
    manifest = yaml.safe_load(path.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("tkcc.dev/v1alpha1", "InferenceDeployment")
    return manifest["spec"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_examples_are_valid_and_can_roll_out(path):
    assert steps_of(from_dict(Spec, load(path)))


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    else:
        yield ".".join(path), value


def test_the_full_example_names_every_field_and_its_default():
    given = load(EXAMPLES / "full.yaml")
    default = to_dict(from_dict(Spec, {"model": given["model"]}))
    commented = {"rollout.approvedArtifact", "recompilation.proposer.scriptConfigMap"}  # need another field beside them
    have = dict(leaves(to_dict(from_dict(Spec, given))))
    named = dict(leaves(given))
    for path, value in leaves(default):
        if any(path == shown or path.startswith(f"{shown}.") for shown in SHOWN):
            continue
        assert path in named or path in commented, f"{path} is not in full.yaml"
        assert have[path] == value, f"{path}: full.yaml says {have[path]}, the default is {value}"
