"""Sampling from known logits: greedy, distributions, seeds, logprobs, and refusal of what is no number."""

import math
import random
from collections import Counter

import pytest
import torch

from tkcc.engine.serve.request import Request, SamplingParams
from tkcc.engine.serve.sampling import NonFiniteLogitsError, sample

PROBS = [0.5, 0.3, 0.15, 0.05]
LOGITS_V = torch.tensor(PROBS).log()


def request(seed=0, **params):
    return Request("r", (1,), SamplingParams(**params), random.Random(seed))


def draw(count, **params):
    one = request(**params)
    return Counter(sample(LOGITS_V[None], [one])[0].token for _ in range(count))


def test_temperature_zero_takes_the_likeliest():
    assert draw(20, temperature=0) == {0: 20}


@pytest.mark.parametrize("temperature, want", [(1.0, PROBS), (0.5, [p * p / 0.365 for p in PROBS])])
def test_frequencies_follow_the_distribution(temperature, want):
    seen = draw(4000, temperature=temperature)
    for token, probability in enumerate(want):
        # 4 standard deviations of a binomial
        assert abs(seen[token] / 4000 - probability) < 4 * math.sqrt(probability * (1 - probability) / 4000), token


@pytest.mark.parametrize("top_p, want", [(0.01, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.94, {0, 1, 2})])
def test_top_p_keeps_the_nucleus_and_its_proportions(top_p, want):
    seen = draw(3000, top_p=top_p)
    assert set(seen) == want
    total = sum(PROBS[token] for token in want)
    assert all(abs(seen[token] / 3000 - PROBS[token] / total) < 0.04 for token in want)


def test_a_seed_gives_the_same_tokens_in_any_batch():
    alone = request(seed=7)
    first = [sample(LOGITS_V[None], [alone])[0].token for _ in range(30)]
    among, others = request(seed=7), [request(seed=i, top_p=0.9, temperature=2.0) for i in range(3)]
    rows_bv = LOGITS_V.expand(4, -1)
    again = [sample(rows_bv, [others[0], among, *others[1:]])[1].token for _ in range(30)]
    assert again == first and len(set(first)) > 1


def test_greedy_and_drawn_rows_share_a_batch():
    rows_bv = torch.stack([LOGITS_V, LOGITS_V.flip(0), LOGITS_V])
    tokens = sample(rows_bv, [request(temperature=0), request(temperature=0), request(top_p=1e-6)])
    assert [t.token for t in tokens] == [0, 3, 0]


def test_logprobs_are_of_the_models_own_distribution():
    asked = [request(temperature=0, num_logprobs=2), request(temperature=0), request(temperature=0, num_logprobs=0)]
    with_top, without, chosen_only = sample(LOGITS_V.expand(3, -1), asked)
    assert without.logprobs is None and chosen_only.logprobs.top == ()
    assert with_top.logprobs.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in with_top.logprobs.top] == [0, 1]
    assert [value for _, value in with_top.logprobs.top] == pytest.approx([math.log(0.5), math.log(0.3)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_give_no_token(bad):
    rows_bv = LOGITS_V.repeat(2, 1)
    rows_bv[1, 2] = bad
    with pytest.raises(NonFiniteLogitsError):
        sample(rows_bv, [request(temperature=0), request(temperature=0)])


def test_large_token_ids_survive():
    logits_bv = torch.zeros(1, 200_003)
    logits_bv[0, 200_001] = 9.0
    assert sample(logits_bv, [request(temperature=0, num_logprobs=1)])[0].logprobs.top[0][0] == 200_001
