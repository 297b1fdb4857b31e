"""The baseline against transformers: the same logits from the same directory, on odd shapes and odd batches."""

import json

import pytest
import torch

from tests.models.stepping import Stepper, build_spec
from tkcc.engine.step import StepRequest
from tkcc.models.checkpoint import load_config, load_weights
from tkcc.models.llama import build
from tkcc.models.random_model import Shape, write_random_model

ODD_SHAPES = {
    "grouped heads, tied": Shape(layers=2, hidden=48, heads=6, kv_heads=2, intermediate=77, vocab=300),
    "one KV head, head dim of its own": Shape(
        layers=3, hidden=120, heads=5, kv_heads=1, head_dim=18, intermediate=131, vocab=301
    ),
    "no grouping, untied": Shape(layers=1, hidden=36, heads=3, kv_heads=3, intermediate=50, vocab=333, tied=False),
    "Qwen3: norms on q and k": Shape(
        layers=2, hidden=40, heads=4, kv_heads=2, head_dim=22, intermediate=90, vocab=299, qk_norm=True
    ),
}
TOKENS = [(7 * i * i + 3 * i) % 290 for i in range(53)]  # no multiple of the block


def made(tmp_path, shape, seed=1, **config_changes):
    write_random_model(tmp_path, shape, seed=seed)
    if config_changes:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config_changes}))
    config = load_config(tmp_path)
    spec = build_spec(config)
    return Stepper(build(spec, load_weights(tmp_path, "cpu", torch.float32), ()), spec)


def theirs(tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", ODD_SHAPES)
def test_every_position_has_transformers_logits(name, tmp_path):
    ours_tv = made(tmp_path, ODD_SHAPES[name]).all_logits(TOKENS, batch=17)
    theirs_tv = theirs(tmp_path, TOKENS)
    assert theirs_tv.std() > 0.3  # logits that say something
    torch.testing.assert_close(ours_tv, theirs_tv, rtol=1e-4, atol=1e-4)


def test_long_context_rope_of_llama_3_has_transformers_logits(tmp_path):
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 24, "rope_theta": 500.0}
    shape = Shape(layers=2, hidden=64, heads=2, kv_heads=1, vocab=300)
    stepper = made(tmp_path, shape, rope_parameters=rope)
    plain = made(tmp_path / "plain", shape)
    ours_tv = stepper.all_logits(TOKENS)
    torch.testing.assert_close(ours_tv, theirs(tmp_path, TOKENS), rtol=1e-4, atol=1e-4)
    assert (ours_tv - plain.all_logits(TOKENS)).abs().max() > 0.01  # the rule is in force


@pytest.mark.parametrize("chunks", [(53,), (1, 52), (16, 16, 21), (30, 1, 1, 21), (52, 1)])
def test_a_prefill_in_chunks_is_the_prefill_in_one(chunks, tmp_path):
    stepper = made(tmp_path, ODD_SHAPES["grouped heads, tied"])
    want_v = theirs(tmp_path, TOKENS)[-1]
    pages, start, logits_bv = stepper.take_pages(len(TOKENS)), 0, None
    for count in chunks:
        logits_bv = stepper.prefill(StepRequest(tuple(TOKENS[start : start + count]), start, pages))
        start += count
    torch.testing.assert_close(logits_bv[0], want_v, rtol=1e-4, atol=1e-4)


def test_requests_in_one_prefill_do_not_see_each_other(tmp_path):
    stepper = made(tmp_path, ODD_SHAPES["one KV head, head dim of its own"])
    a, b, c = TOKENS[:5], TOKENS[5:38], TOKENS[20:22]
    pages = [stepper.take_pages(40) for _ in range(3)]
    stepper.prefill(StepRequest(tuple(b[:20]), 0, pages[1]))  # b's first tokens are in the cache already
    together_bv = stepper.prefill(
        StepRequest(tuple(a), 0, pages[0]),
        StepRequest(tuple(b[20:]), 20, pages[1]),
        StepRequest(tuple(c), 0, pages[2]),
    )
    for row, tokens in zip(together_bv, (a, b, c), strict=True):
        torch.testing.assert_close(row, theirs(tmp_path, tokens)[-1], rtol=1e-4, atol=1e-4)


def test_greedy_text_is_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    stepper = made(tmp_path, ODD_SHAPES["Qwen3: norms on q and k"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    want = model.generate(torch.tensor([TOKENS]), max_new_tokens=30, do_sample=False)[0, len(TOKENS) :].tolist()
    assert stepper.greedy(TOKENS, 30) == want


def test_equal_batches_give_equal_bits(tmp_path):
    shape = ODD_SHAPES["grouped heads, tied"]
    first, again = (made(tmp_path / str(i), shape).all_logits(TOKENS) for i in range(2))
    assert torch.equal(first, again)


def test_bfloat16_is_near_float32(tmp_path):
    write_random_model(tmp_path, ODD_SHAPES["grouped heads, tied"], seed=1)
    config = load_config(tmp_path)
    exact_tv, rounded_tv = (
        Stepper(build(spec, load_weights(tmp_path, "cpu", dtype), ()), spec).all_logits(TOKENS).float()
        for dtype in (torch.float32, torch.bfloat16)
        for spec in [build_spec(config, dtype)]
    )
    error = (exact_tv - rounded_tv).abs()
    assert 0 < error.median() < 0.03 and error.max() < 0.3, (error.median(), error.max())


def test_a_missing_weight_is_named(tmp_path):
    write_random_model(tmp_path, Shape(layers=1))
    weights = load_weights(tmp_path, "cpu", torch.float32)
    del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(KeyError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        build(build_spec(load_config(tmp_path)), weights, ())
