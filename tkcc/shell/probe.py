"""Correctness probes: fixed prompts, greedy, on canary pods against a stable pod. Here they are asked and compared;
whether a difference is a near tie or a fault is decided by the core.

They run in the background, because a slow engine may take seconds, and a turn must not wait for that.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from tkcc.control.observed import ProbeSeen
from tkcc.shell.render.names import SERVING_PORT
from tkcc.shell.scrape import PLAIN, PodAddress, bounded

log = logging.getLogger(__name__)

PROBE_HEADER = "x-tkcc-probe"  # the engine leaves such requests out of its counts, its ring and its recording
MAX_TOKENS = 24
TOP_LOGPROBS = 5
MAX_ANSWER_BYTES = 1_000_000

_PARAGRAPH = (
    "The harbour master kept a ledger of every vessel that came in from the north: its name, the day, the depth of its "
    "keel, the weight of its cargo and the weather it had met. In a dry year the entries were short. "
)
# Short, middle and long, and two that share a prefix, so that every path of a forward pass is taken.
PROMPTS = {
    "short": "The capital of France is",
    "count": "1, 2, 3, 4, 5, 6, 7,",
    "paragraph": _PARAGRAPH + "That spring the first ship to arrive was",
    "long": _PARAGRAPH * 6 + "In a wet year the entries were",
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities in nats, and the most likely tokens at each place."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]


def compare(pod: str, prompt_id: str, at: datetime, stable: Answer, canary: Answer) -> ProbeSeen:
    """Where the canary's tokens first differ from the stable pod's, and how much the stable pod prefers its own there.
    A token outside the stable pod's top ones is at least as far off as the last of them."""
    places = range(max(len(stable.tokens), len(canary.tokens)))
    split = next((i for i in places if stable.tokens[i : i + 1] != canary.tokens[i : i + 1]), None)
    if split is None:
        return ProbeSeen(pod, at, prompt_id, tokens_match=True)
    gap: float | None = None
    if split < len(stable.tokens) and split < len(canary.tokens) and split < len(stable.top) and stable.top[split]:
        top = stable.top[split]
        gap = stable.logprobs[split] - top.get(canary.tokens[split], min(top.values()))
    return ProbeSeen(pod, at, prompt_id, tokens_match=False, divergence_idx=split, logprob_gap_nats=gap)


def parse_answer(body: Any) -> Answer:
    """Of an OpenAI completion with logprobs. Raises ValueError that says what is missing."""
    try:
        choice = body["choices"][0]
        if choice["logprobs"] is None and choice["text"] == "" and choice["finish_reason"] == "stop":
            return Answer((), (), ())  # it ended at once, and said so
        logprobs = choice["logprobs"]
        tokens = tuple(str(token) for token in logprobs["tokens"])
        values = tuple(float(value) for value in logprobs["token_logprobs"])
        top = tuple({str(k): float(v) for k, v in (place or {}).items()} for place in logprobs["top_logprobs"])
    except (KeyError, IndexError, TypeError, AttributeError) as err:
        raise ValueError(f"a completion without usable logprobs: {type(err).__name__}: {err}") from err
    if not tokens or not len(tokens) == len(values) == len(top):
        raise ValueError(f"a completion with {len(tokens)} tokens and {len(values)} logprobs")
    return Answer(tokens, values, top)


class Prober:
    """The latest answers of one InferenceDeployment's canary pods."""

    def __init__(self, http: httpx.AsyncClient, timeout_s: float, on_done: Callable[[], None]):
        self._http = http
        self._timeout_s = timeout_s
        self._on_done = on_done
        self._seen: dict[tuple[str, str], ProbeSeen] = {}  # (pod, prompt)
        self._task: asyncio.Task[None] | None = None

    @property
    def seen(self) -> tuple[ProbeSeen, ...]:
        return tuple(self._seen.values())

    def keep(self, pods: frozenset[str]) -> None:
        """Forget pods that are gone."""
        self._seen = {key: probe for key, probe in self._seen.items() if key[0] in pods}

    def ensure(self, canaries: Sequence[PodAddress], stable: PodAddress | None, model: str, after: datetime) -> None:
        """Ask those canary pods that have not answered all prompts since `after`, unless that is under way."""
        due = [pod for pod in canaries if not self._is_answered(pod.pod, after)]
        if due and stable and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._probe(due, stable, model), name="probe")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _is_answered(self, pod: str, after: datetime) -> bool:
        return all((probe := self._seen.get((pod, name))) and not probe.error and probe.at >= after for name in PROMPTS)

    async def _probe(self, canaries: Sequence[PodAddress], stable: PodAddress, model: str) -> None:
        """One prompt at a time, so that the probes themselves do not make a queue in the pods they judge."""
        try:
            for name, prompt in PROMPTS.items():
                at = datetime.now(UTC)
                try:
                    reference = await self._ask(stable, model, prompt)
                except (httpx.HTTPError, ValueError) as err:
                    log.warning("probe: stable pod %s did not answer: %s", stable.pod, err or type(err).__name__)
                    return
                for pod in canaries:
                    try:
                        probe = compare(pod.pod, name, at, reference, await self._ask(pod, model, prompt))
                    except (httpx.HTTPError, ValueError) as err:
                        text = f"{type(err).__name__}: {str(err)[:200]}"
                        probe = ProbeSeen(pod.pod, at, name, tokens_match=False, error=text)
                    self._seen[pod.pod, name] = probe
        finally:
            self._on_done()

    async def _ask(self, pod: PodAddress, model: str, prompt: str) -> Answer:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": TOP_LOGPROBS,
        }
        url, headers = pod.url(SERVING_PORT, "/v1/completions"), {PROBE_HEADER: "1", **PLAIN}
        async with self._http.stream("POST", url, json=body, headers=headers, timeout=self._timeout_s) as response:
            response.raise_for_status()
            return parse_answer(json.loads(await bounded(response, MAX_ANSWER_BYTES)))
