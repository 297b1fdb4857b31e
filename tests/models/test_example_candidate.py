"""The candidate that docs/candidates.md shows: it computes what the baseline does."""

import runpy
from pathlib import Path

import pytest
import torch

from tests.models.stepping import Stepper, build_spec
from tkcc.models.checkpoint import load_config, load_weights
from tkcc.models.llama import build
from tkcc.models.random_model import Shape, write_random_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "candidates" / "one_request.py"
TOKENS = [(7 * i * i + 3 * i) % 290 for i in range(53)]  # no multiple of the block


@pytest.mark.parametrize("batch", [1, 5])
def test_its_logits_are_the_baselines(batch, tmp_path):
    write_random_model(tmp_path, Shape(layers=2, hidden=48, heads=6, kv_heads=2, vocab=300), seed=1)
    spec, weights = build_spec(load_config(tmp_path)), load_weights(tmp_path, "cpu", torch.float32)
    example = runpy.run_path(str(EXAMPLE))["build"](spec, weights, ())
    got_tv, want_tv = (Stepper(f, spec).all_logits(TOKENS, batch) for f in (example, build(spec, weights, ())))
    torch.testing.assert_close(got_tv, want_tv, rtol=1e-4, atol=1e-4)
