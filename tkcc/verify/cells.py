"""A stream of steps becomes a few cells: what the forward pass spends its time on, with real steps for each.

A cell is named by powers of two of batch, new tokens and context; its weight is its share of the time. Timing draws
the recorded steps themselves, ragged as they were, never a mean of them.
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tkcc.engine.step import StepBatch, StepKind
from tkcc.models.forward import Cell

MAX_CELLS = 5
COVERED_RATIO = 0.97  # cells beyond this share of the time are left out
STEPS_PER_CELL = 24


@dataclass(frozen=True, slots=True)
class TimedCell:
    cell: Cell
    count: int  # steps of this cell in the replay
    steps: tuple[StepBatch, ...]  # a sample of them, in order

    def describe(self) -> dict[str, Any]:
        return asdict(self.cell)


@dataclass(slots=True)
class _Bucket:
    count: int = 0
    time_s: float = 0.0
    sample: list[StepBatch] = field(default_factory=list)


def make_cells(steps: Iterable[tuple[StepBatch, float]], seed: int) -> tuple[TimedCell, ...]:
    """The cells that cover the time, heaviest first. Steps come with their cost in seconds."""
    rng = random.Random(seed)
    buckets: dict[tuple[str, int, int, int], _Bucket] = {}
    for step, cost_s in steps:
        bucket = buckets.setdefault(_key(step), _Bucket())
        bucket.count += 1
        bucket.time_s += cost_s
        if len(bucket.sample) < STEPS_PER_CELL:
            bucket.sample.append(step)
        else:  # a reservoir: every step of the cell is as likely to be in the sample
            at = rng.randrange(bucket.count)
            if at < STEPS_PER_CELL:
                bucket.sample[at] = step
    total_s = sum(b.time_s for b in buckets.values())
    heaviest = sorted(buckets.values(), key=lambda b: -b.time_s)[:MAX_CELLS]
    kept: list[_Bucket] = []
    for bucket in heaviest:
        kept.append(bucket)
        if sum(b.time_s for b in kept) >= COVERED_RATIO * total_s:
            break
    kept_s = sum(b.time_s for b in kept)
    return tuple(TimedCell(_cell(b, b.time_s / kept_s), b.count, tuple(b.sample)) for b in kept)


def _key(step: StepBatch) -> tuple[str, int, int, int]:
    context = sum(r.context for r in step.requests) // len(step.requests)
    batch = len(step.requests) if step.kind is StepKind.DECODE else 1
    new = step.num_tokens if step.kind is StepKind.PREFILL else 1
    return step.kind, _power(batch), _power(new), _power(context)


def _power(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(0, n - 1).bit_length()


def _cell(bucket: _Bucket, weight_ratio: float) -> Cell:
    requests = [r for step in bucket.sample for r in step.requests]
    return Cell(
        phase=bucket.sample[0].kind.value,
        batch=round(median(len(step.requests) for step in bucket.sample)),
        new_tokens=round(median(len(r.tokens) for r in requests)),
        context_tokens=round(median(r.context for r in requests)),
        weight_ratio=weight_ratio,
    )
