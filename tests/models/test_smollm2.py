"""The real model: SmolLM2-135M-Instruct as imported, beside transformers on the same directory."""

import math
from pathlib import Path

import pytest
import torch

from tests.models.stepping import Stepper, build_spec
from tkcc.models.catalogue import default_dir
from tkcc.models.checkpoint import load_config, load_weights, model_digest
from tkcc.models.llama import build

MODEL = default_dir("smollm2-135m-instruct")
TEXT = (Path(__file__).parent / "data" / "alice.txt").read_text()
pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").exists(), reason="not imported yet: tkcc model import smollm2-135m-instruct"
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours():
    spec = build_spec(load_config(MODEL))
    return Stepper(build(spec, load_weights(MODEL, "cpu", torch.float32), ()), spec)


def perplexity(logits_tv, ids):
    logprobs_tv = logits_tv[:-1].float().log_softmax(-1)
    return math.exp(-logprobs_tv[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean())


def test_logits_and_perplexity_are_transformers(tokenizer, theirs, ours):
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.decode(ids) == TEXT
    with torch.inference_mode():
        want_tv = theirs(torch.tensor([ids])).logits[0]
    got_tv = ours.all_logits(ids)
    assert (got_tv - want_tv).abs().max() < 1e-3  # of logits that reach 20: sums in another order, no more
    assert perplexity(got_tv, ids) == pytest.approx(perplexity(want_tv, ids), rel=1e-4)
    assert 15 < perplexity(got_tv, ids) < 30  # English it half knows; a wrong split or rotation gives hundreds


def test_greedy_text_is_transformers(tokenizer, theirs, ours):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    theirs.generation_config.eos_token_id = None
    want = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert ours.greedy(ids, 24) == want
    assert "Paris" in tokenizer.decode(want)


def test_the_import_is_the_same_everywhere():
    assert model_digest(MODEL) == "790d270556d995f6ef8f18848941fcabd1d1955378aa5f7bcf716115b8ce9378"
