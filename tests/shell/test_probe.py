"""Probes: where two answers split, and that each pod is asked as often as needed, not more."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.fakes.pod import FakePod
from tkcc.shell.probe import PROMPTS, Answer, Prober, compare, parse_answer
from tkcc.shell.scrape import PodAddress

AT = datetime(2026, 1, 1, tzinfo=UTC)
LONG_AGO = datetime.fromtimestamp(0, UTC)
_octets = itertools.count(10)


def answer(*tokens: str, runner_up: str = "?", gap: float = 2.0) -> Answer:
    return Answer(tokens, (-0.1,) * len(tokens), tuple({token: -0.1, runner_up: -0.1 - gap} for token in tokens))


@pytest.mark.parametrize(
    "case, stable, canary, want_match, want_idx, want_gap",
    [
        ("equal answers match", answer("a", "b"), answer("a", "b"), True, None, None),
        ("a near tie is a small gap", answer("a", "b", runner_up="x", gap=0.01), answer("a", "x"), False, 1, 0.01),
        ("a clear choice is a large gap", answer("a", runner_up="x", gap=5.0), answer("x"), False, 0, 5.0),
        ("a token outside the top is at least as far as its last", answer("a", gap=3.0), answer("z"), False, 0, 3.0),
        ("an answer that stops early splits where it stops", answer("a", "b"), answer("a"), False, 1, None),
        ("an answer that goes on splits where the other stopped", answer("a"), answer("a", "b"), False, 1, None),
    ],
)
def test_compare(case, stable, canary, want_match, want_idx, want_gap):
    seen = compare("canary-1", "short", AT, stable, canary)
    assert (seen.tokens_match, seen.divergence_idx) == (want_match, want_idx)
    assert seen.logprob_gap_nats == (pytest.approx(want_gap) if want_gap is not None else None)


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"logprobs": None}]}, {"choices": [{"logprobs": {"tokens": []}}]}]
)
def test_a_completion_without_logprobs_is_an_error_not_a_match(body):
    with pytest.raises(ValueError, match="completion with"):
        parse_answer(body)


def test_an_answer_that_ends_at_once_is_an_answer():
    choice = {"text": "", "logprobs": None, "finish_reason": "stop"}
    assert parse_answer({"choices": [choice]}) == Answer((), (), ())
    with pytest.raises(ValueError, match="without usable logprobs"):
        parse_answer({"choices": [{**choice, "text": "words"}]})


@pytest.fixture
async def pods() -> AsyncIterator[tuple[FakePod, FakePod]]:
    stable = await FakePod(f"127.0.2.{next(_octets)}").start()
    canary = await FakePod(f"127.0.2.{next(_octets)}").start()
    yield stable, canary
    await stable.stop()
    await canary.stop()


@pytest.fixture
async def prober() -> AsyncIterator[tuple[Prober, asyncio.Event]]:
    done = asyncio.Event()
    async with httpx.AsyncClient(trust_env=False) as http:
        made = Prober(http, 2.0, done.set)
        yield made, done
        await made.close()


async def ask(prober: Prober, done: asyncio.Event, pods: tuple[FakePod, FakePod], after: datetime) -> None:
    stable, canary = (PodAddress(name, pod.ip) for name, pod in zip(("stable-1", "canary-1"), pods, strict=True))
    done.clear()
    prober.ensure([canary], stable, "smol", after)
    async with asyncio.timeout(5):
        await done.wait()


async def test_every_prompt_is_asked_of_both_pods_and_marked_as_a_probe(pods, prober):
    await ask(*prober, pods, LONG_AGO)
    assert {probe.prompt_id for probe in prober[0].seen} == set(PROMPTS)
    assert all(probe.tokens_match for probe in prober[0].seen)
    assert [pod.probes_seen for pod in pods] == [len(PROMPTS)] * 2


async def test_a_wrong_canary_is_seen_with_its_gap(pods, prober):
    pods[1].words = ("a", "z", "c", "d")
    await ask(*prober, pods, LONG_AGO)
    assert [probe.divergence_idx for probe in prober[0].seen] == [1] * len(PROMPTS)
    assert [probe.logprob_gap_nats for probe in prober[0].seen] == pytest.approx([2.0] * len(PROMPTS))


async def test_answered_pods_are_not_asked_again_until_a_newer_answer_is_wanted(pods, prober):
    await ask(*prober, pods, LONG_AGO)
    stable, canary = (PodAddress(name, pod.ip) for name, pod in zip(("stable-1", "canary-1"), pods, strict=True))
    prober[0].ensure([canary], stable, "smol", LONG_AGO)
    assert pods[1].probes_seen == len(PROMPTS)
    await ask(*prober, pods, max(probe.at for probe in prober[0].seen) + timedelta(microseconds=1))
    assert pods[1].probes_seen == 2 * len(PROMPTS)


async def test_a_canary_that_does_not_answer_is_an_error_and_is_asked_again(pods, prober):
    await pods[1].stop()
    await ask(*prober, pods, LONG_AGO)
    assert {probe.error.split(":")[0] for probe in prober[0].seen} == {"ConnectError"}
    await pods[1].start()
    await ask(*prober, pods, LONG_AGO)
    assert {probe.error for probe in prober[0].seen} == {""}


async def test_without_a_stable_answer_nothing_is_claimed(pods, prober):
    await pods[0].stop()
    await ask(*prober, pods, LONG_AGO)
    assert prober[0].seen == ()


async def test_probes_of_pods_that_are_gone_are_forgotten(pods, prober):
    await ask(*prober, pods, LONG_AGO)
    prober[0].keep(frozenset({"other"}))
    assert prober[0].seen == ()
