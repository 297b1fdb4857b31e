"""Model directories: what is read out of them, and what is refused with which words."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tkcc.models.checkpoint import (
    CheckpointError,
    checkpoint_dtype,
    load_config,
    load_weights,
    model_digest,
    weight_shapes,
)
from tkcc.models.random_model import Shape, write_random_model


@pytest.fixture
def model(tmp_path):
    write_random_model(tmp_path, Shape(layers=2, vocab=300))
    return tmp_path


def change_config(model, **changes):
    path = model / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    "case, changes, want",
    [
        ("another architecture", {"architectures": ["GPT2LMHeadModel"]}, "unknown architecture 'GPT2LMHeadModel'"),
        ("no architecture", {"architectures": None}, "unknown architecture '(none)'"),
        ("a key is missing", {"hidden_size": None}, "'hidden_size' is missing"),
        ("not a number", {"hidden_size": "wide"}, "invalid literal"),
        ("another activation", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ("biases", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("a RoPE that is not known", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ("heads that do not group", {"num_key_value_heads": 3}, "4 heads are no multiple of 3"),
        ("an odd head", {"head_dim": 15}, "head_dim 15 is odd"),
        ("other sizes than the file's", {"intermediate_size": 99}, "config.json asks for [99, 64]"),
        ("more layers than the file's", {"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_a_directory_that_would_go_wrong_is_refused(case, changes, want, model):
    change_config(model, **changes)
    with pytest.raises(CheckpointError) as err:
        load_config(model)
        load_weights(model, "cpu", torch.float32)
    assert want in str(err.value) and str(model) in str(err.value), case


@pytest.mark.parametrize(
    "case, spoil, want",
    [
        ("no directory", lambda d: d / "nowhere", "no such model directory"),
        ("no config.json", lambda d: (d / "config.json").unlink(), "config.json is missing"),
        ("config.json is not JSON", lambda d: (d / "config.json").write_text("{"), "not readable as JSON"),
        ("config.json is a list", lambda d: (d / "config.json").write_text("[]"), "a JSON object is expected"),
        ("no weights", lambda d: (d / "model.safetensors").unlink(), "no *.safetensors file"),
        ("weights are cut off", lambda d: cut(d / "model.safetensors"), "not a readable safetensors file"),
        (
            "weights are something else",
            lambda d: (d / "model.safetensors").write_text("hello, there"),
            "not a readable",
        ),
    ],
)
def test_a_broken_directory_is_named(case, spoil, want, model):
    other = spoil(model)
    directory = other if case == "no directory" else model
    with pytest.raises(CheckpointError, match=want.replace("*", r"\*")):
        load_config(directory)
        load_weights(directory, "cpu", torch.float32)


def cut(path):
    path.write_bytes(path.read_bytes()[:5000])


def test_old_and_new_spellings_of_the_configuration_agree(model):
    old = load_config(model)
    assert old.rope_theta == 10_000.0 and checkpoint_dtype(model) == "float32"
    change_config(
        model,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        torch_dtype=None,
        dtype="bfloat16",
    )
    assert load_config(model) == old and checkpoint_dtype(model) == "bfloat16"


def test_weights_are_those_of_the_file_in_the_dtype_asked_for(model):
    weights = load_weights(model, "cpu", torch.bfloat16)
    assert {name: tuple(w.shape) for name, w in weights.items()} == dict(weight_shapes(load_config(model)))
    for name, tensor in load_file(model / "model.safetensors").items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16))


def test_the_digest_names_weights_and_configuration(model):
    digest = model_digest(model)
    assert model_digest(model) == digest and len(digest) == 64
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, model / "model.safetensors")
    other_weights = model_digest(model)
    change_config(model, rms_norm_eps=1e-6)
    assert len({digest, other_weights, model_digest(model)}) == 3


def test_the_same_seed_writes_the_same_model(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_random_model(tmp_path / name, Shape(layers=1), seed=seed)
    files = [{f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "abc"]
    assert files[0] == files[1] != files[2]
