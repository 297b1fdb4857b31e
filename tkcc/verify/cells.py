"""A stream of steps becomes a few cells: what the forward pass spends its time on, with real steps for each.

Decode steps fall into cells by batch and context, prefill steps by new tokens and by whether a prefix was cached. The
heaviest cells of each phase stand for the whole phase, so that no phase goes unmeasured. Timing draws the recorded
steps themselves, ragged as they were, never a mean of them.
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tkcc.engine.step import StepBatch, StepKind
from tkcc.models.forward import Cell

CELLS_PER_PHASE = 3
COVERED_RATIO = 0.75  # of a phase's time: more cells would make each pair longer for little of it
IGNORED_RATIO = 0.02  # a phase with less of the time than this is left out, and so are a phase's lightest cells
STEPS_PER_CELL = 24


@dataclass(frozen=True, slots=True)
class TimedCell:
    cell: Cell
    count: float  # steps that it stands for in the replay
    steps: tuple[StepBatch, ...]  # a sample of them, in order

    def describe(self) -> dict[str, Any]:
        return asdict(self.cell)


@dataclass(slots=True)
class _Bucket:
    count: int = 0
    time_s: float = 0.0
    sample: list[StepBatch] = field(default_factory=list)


def make_cells(steps: Iterable[tuple[StepBatch, float]], seed: int) -> tuple[TimedCell, ...]:
    """The cells that stand for the time, heaviest first. Steps come with their cost in seconds."""
    rng = random.Random(seed)
    buckets: dict[tuple[StepKind, int, int], _Bucket] = {}
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
    cells = []
    for phase in StepKind:
        mine = sorted((b for key, b in buckets.items() if key[0] == phase), key=lambda b: -b.time_s)
        phase_s = sum(b.time_s for b in mine)
        if phase_s < IGNORED_RATIO * total_s:
            continue
        kept = _heaviest(mine, phase_s)
        scale = phase_s / sum(b.time_s for b in kept)  # the kept ones stand for the rest of their phase
        cells += [TimedCell(_cell(b, scale * b.time_s / total_s), scale * b.count, tuple(b.sample)) for b in kept]
    return tuple(sorted(cells, key=lambda c: -c.cell.weight_ratio))


def _heaviest(buckets: list[_Bucket], phase_s: float) -> list[_Bucket]:
    """The first ones, until they cover enough of the phase's time."""
    kept: list[_Bucket] = []
    covered_s = 0.0
    for bucket in buckets[:CELLS_PER_PHASE]:
        if covered_s >= COVERED_RATIO * phase_s or bucket.time_s < IGNORED_RATIO * phase_s:
            break
        kept.append(bucket)
        covered_s += bucket.time_s
    return kept


def _key(step: StepBatch) -> tuple[StepKind, int, int]:
    context = sum(r.context for r in step.requests) // len(step.requests)
    if step.kind is StepKind.DECODE:
        return step.kind, _power(len(step.requests)), _power(context)
    return step.kind, _power(step.num_tokens), int(any(r.start for r in step.requests))


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
