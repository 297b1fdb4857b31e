"""Candidates become modules: what is loaded, what is refused, and that the baseline is a candidate like any other."""

import inspect

import pytest
import torch

from tkcc.engine.artifact import ArtifactError, baseline, baseline_digest, load_candidate
from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.engine.tensors import kv_block_bytes, make_batch, make_kv_cache
from tkcc.models.checkpoint import load_config, load_weights
from tkcc.models.forward import BuildSpec
from tkcc.models.random_model import Shape, write_random_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, Shape(layers=2, hidden=32, heads=4, kv_heads=2))
    return directory


def test_the_baseline_loads_from_its_own_source_and_gives_the_same_bits(model):
    from tkcc.models import llama

    spec = BuildSpec(load_config(model), torch.float32, CPU, 16, 4, 1)
    weights = load_weights(model, CPU, torch.float32)
    loaded = load_candidate(baseline().source, {})
    step = make_batch(StepBatch(StepKind.PREFILL, (StepRequest((1, 2, 3), 0, (2,)),)), 16, CPU)
    one, other = (build(spec, weights, ()).prefill(step, make_kv_cache(spec)) for build in (llama.build, loaded))
    assert torch.equal(one, other) and baseline_digest() == baseline().digest


def test_a_candidates_source_can_be_read_back_and_its_params_are_its_own():
    build = load_candidate("def build(spec, weights, cells):\n    return 'line two'\n", {"tile": 4})
    assert "line two" in inspect.getsource(build)  # Triton reads kernels so
    other = load_candidate("def build(spec, weights, cells):\n    return 'line two'\n", {"tile": 8})
    assert other.__module__ != build.__module__


@pytest.mark.parametrize(
    "case, source, want",
    [
        ("not Python", "def build(:", "SyntaxError"),
        ("a null byte", "x = 1\0", "does not import"),
        ("an import that is not there", "import nothing_of_that_name", "ModuleNotFoundError"),
        ("it raises", "raise KeyError('x')", "KeyError"),
        ("no build", "def construct(): ...", "defines no function"),
        ("build is no function", "build = 3", "defines no function"),
    ],
)
def test_what_is_no_candidate_is_refused(case, source, want):
    with pytest.raises(ArtifactError, match=want):
        load_candidate(source, {})


def test_a_step_becomes_tensors():
    step = StepBatch(StepKind.PREFILL, (StepRequest((7, 8, 9), 3, (5, 2, 9)), StepRequest((4,), 0, (6,))))
    batch = make_batch(step, 4, CPU)
    assert batch.tokens_t.tolist() == [7, 8, 9, 4] and batch.positions_t.tolist() == [3, 4, 5, 0]
    assert batch.slots_t.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 6 * 4]
    assert batch.pages_bp.tolist() == [[5, 2], [6, 0]]  # cut to the context, padded with the scratch block
    assert (batch.query_starts, batch.context_lens, batch.context_b.tolist()) == ((0, 3, 4), (6, 1), [6, 1])
    assert step.num_tokens == 4


def test_a_kv_cache_has_the_contracts_layout(model):
    spec = BuildSpec(load_config(model), torch.bfloat16, CPU, 16, 5, 1)
    kv = make_kv_cache(spec)
    assert kv.k_lnksd.shape == kv.v_lnksd.shape == (2, 5, 2, 16, 8) and kv.k_lnksd.dtype == torch.bfloat16
    assert not kv.k_lnksd.any() and not kv.v_lnksd.any() and kv.k_lnksd.data_ptr() != kv.v_lnksd.data_ptr()
    assert kv_block_bytes(spec) * 5 == 2 * kv.k_lnksd.numel() * 2
