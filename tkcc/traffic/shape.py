"""From a recorded trace to the load that is sent: a shorter selection of it, scaled by one length and one time factor.

What is kept: order, gaps, the mix of lengths, and who shares which prefix. Sessions are kept or dropped whole, since a
session without its first turns would arrive cold and lower the hit ratio.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tkcc.traffic.reuse import infinite_hit_ratio, sessions
from tkcc.traffic.trace import Trace, TraceError, TraceRequest

HIT_RATIO_TOLERANCE = 0.02
_NUM_SELECTIONS = 32  # ways to choose sessions that are tried before a fraction is refused


@dataclass(frozen=True)
class PlannedRequest:
    """One request to be sent. Its prompt is the tokens of each span in order, then `tail_tokens` of its own."""

    index: int  # in the plan: names its tail
    arrival_s: float
    spans: tuple[tuple[int, int], ...]  # (block id, tokens): equal ids have equal tokens, a shorter span is a prefix
    tail_tokens: int
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.spans) + self.tail_tokens


@dataclass(frozen=True)
class Plan:
    requests: tuple[PlannedRequest, ...]
    length_factor: float
    time_factor: float
    hit_ratio: float  # of an infinite cache over what is sent, token by token
    source_hit_ratio: float  # of the trace it was made from

    @property
    def span_s(self) -> float:
        return self.requests[-1].arrival_s

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(request.prompt_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        return sum(request.output_tokens for request in self.requests) / len(self.requests)


def thin(trace: Trace, fraction: float) -> Trace:
    """A selection of whole sessions with about `fraction` of the requests. Of several selections, all fixed by the
    trace alone, the one nearest to it in hit ratio, mean prompt and size. Raises TraceError where none is near in hit
    ratio."""
    if not 0 < fraction <= 1:
        raise TraceError(f"sessions fraction is {fraction}: expected more than 0 and at most 1")
    if fraction == 1:
        return trace
    numbers = sessions(trace.requests)
    target = infinite_hit_ratio(trace)
    best: tuple[float, float, Trace] | None = None
    for salt in range(_NUM_SELECTIONS):
        chosen = {number for number in set(numbers) if _draw(salt, number) < fraction}
        kept = tuple(request for request, number in zip(trace.requests, numbers, strict=True) if number in chosen)
        if not kept:
            continue
        candidate = _from_zero(replace(trace, requests=kept))
        off = abs(infinite_hit_ratio(candidate) - target)
        distance = (
            off / HIT_RATIO_TOLERANCE
            + abs(math.log(candidate.mean_prompt_tokens / trace.mean_prompt_tokens)) / 0.05
            + abs(math.log(len(kept) / (fraction * len(trace.requests)))) / 0.1
        )
        if best is None or distance < best[0]:
            best = (distance, off, candidate)
        if distance < 0.5:
            break
    if best is None or best[1] > HIT_RATIO_TOLERANCE:
        raise TraceError(
            f"keeping {fraction:g} of {len(set(numbers))} sessions changes the hit ratio ({target:.3f}) by "
            f"{best[1] if best else 1:.3f}, more than {HIT_RATIO_TOLERANCE}: keep a larger fraction"
        )
    return best[2]


def scale(trace: Trace, length_factor: float, time_factor: float, max_prompt_tokens: int | None = None) -> Plan:
    """Multiply every length (prompts, outputs, prefix blocks) by `length_factor` and every gap by `time_factor`.
    Requests whose scaled prompt is longer than `max_prompt_tokens` are left out; the plan says what that did to the
    hit ratio."""
    for name, factor in (("length factor", length_factor), ("time factor", time_factor)):
        if not (math.isfinite(factor) and factor > 0):
            raise TraceError(f"{name} is {factor}: expected a positive number")
    kept = [r for r in trace.requests if max_prompt_tokens is None or _scaled(r, length_factor) <= max_prompt_tokens]
    if not kept:
        raise TraceError(
            f"no request has a prompt of at most {max_prompt_tokens} tokens at length factor {length_factor:g}: "
            "lower the length factor or raise --max-prompt"
        )
    first = kept[0].arrival_s
    requests = tuple(
        _plan(
            index, request, trace.block_tokens * length_factor, length_factor, (request.arrival_s - first) * time_factor
        )
        for index, request in enumerate(kept)
    )
    return Plan(requests, length_factor, time_factor, _hit_ratio(requests), infinite_hit_ratio(trace))


def repeat(plan: Plan) -> Iterator[Plan]:
    """The plan again and again, each pass with block ids of its own (so it meets a cold cache as the first did) and, on
    average, the gap of the trace between two passes."""
    stride = 1 + max((block for request in plan.requests for block, _ in request.spans), default=0)
    gap_s = plan.span_s / max(1, len(plan.requests) - 1)
    number = 0
    while True:
        yield replace(
            plan,
            requests=tuple(
                replace(
                    request,
                    index=request.index + number * len(plan.requests),
                    arrival_s=request.arrival_s + number * (plan.span_s + gap_s),
                    spans=tuple((block + number * stride, tokens) for block, tokens in request.spans),
                )
                for request in plan.requests
            ),
        )
        number += 1


def _scaled(request: TraceRequest, length_factor: float) -> int:
    return max(1, round(request.prompt_tokens * length_factor))


def _plan(
    index: int, request: TraceRequest, block_tokens: float, length_factor: float, arrival_s: float
) -> PlannedRequest:
    """Block i covers the scaled positions round(i * block) to round((i + 1) * block), so that rounding never adds
    up."""
    left = _scaled(request, length_factor)
    spans = []
    for i, block in enumerate(request.block_ids):
        tokens = min(left, round((i + 1) * block_tokens) - round(i * block_tokens))
        if tokens > 0:
            spans.append((block, tokens))
            left -= tokens
    return PlannedRequest(index, arrival_s, tuple(spans), left, max(1, round(request.output_tokens * length_factor)))


def _hit_ratio(requests: Sequence[PlannedRequest]) -> float:
    seen: dict[int, int] = {}  # block id -> longest span sent
    hit_tokens = 0
    for request in requests:
        for block, tokens in request.spans:
            known = min(tokens, seen.get(block, 0))
            hit_tokens += known
            if known < tokens:
                break
        for block, tokens in request.spans:
            seen[block] = max(tokens, seen.get(block, 0))
    return hit_tokens / sum(request.prompt_tokens for request in requests)


def _draw(salt: int, session: int) -> float:
    """Uniform in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(f"{salt}:{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _from_zero(trace: Trace) -> Trace:
    first = trace.requests[0].arrival_s
    return replace(trace, requests=tuple(replace(r, arrival_s=r.arrival_s - first) for r in trace.requests))
