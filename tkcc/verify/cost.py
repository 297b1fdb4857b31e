"""What a step costs under the baseline revision of the whole model: the pace at which the recording is replayed.

A tier with few layers replays the traffic at the whole model's pace, or its steps would be narrower than those in
service. So cost is measured with one layer and with the tier's, and extended to all of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.engine.tier.arena import Geometry
from tkcc.verify.executor import Local
from tkcc.verify.model import TierModel

Cost = Callable[[StepBatch], float]
_CONTEXT = 256  # longest probe
_ROUNDS = 2  # the faster one counts


def fit(model: TierModel, max_positions: int, block_tokens: int) -> Cost:
    """Seconds of a step, linear in its tokens and in the positions that they attend to."""
    long = max(2, min(_CONTEXT, max_positions // 2))
    probes = {
        StepKind.PREFILL: [(1, 8, 8), (1, long // 2, long // 2), (1, long // 2, long)],
        StepKind.DECODE: [(1, 1, 16), (1, 1, long), (4, 1, 16), (8, 1, long)],
    }
    steps = {
        kind: [_step(kind, *shape, block_tokens, model.config.vocab_size) for shape in shapes]
        for kind, shapes in probes.items()
    }
    layers = model.config.num_layers
    one = _coefficients(model, 1, steps, block_tokens)
    tier = _coefficients(model, layers, steps, block_tokens) if layers > 1 else one
    full = {
        kind: [
            a + max(0.0, b - a) / max(1, layers - 1) * (model.full_layers - 1)
            for a, b in zip(one[kind], tier[kind], strict=True)
        ]
        for kind in steps
    }
    return lambda step: float(sum(c * f for c, f in zip(full[step.kind], _features(step), strict=True)))


def _coefficients(
    model: TierModel, num_layers: int, steps: dict[StepKind, list[StepBatch]], block_tokens: int
) -> dict[StepKind, list[float]]:
    blocks = max(b for probes in steps.values() for s in probes for r in s.requests for b in r.blocks) + 1
    geometry = Geometry(8, _CONTEXT, blocks, blocks, block_tokens)
    baseline = Local(
        replace(model.config, num_layers=num_layers), model.everything, model.dtype, geometry, model.threads
    )
    fits = {}
    for kind, probes in steps.items():
        rows = torch.tensor([_features(step) for step in probes], dtype=torch.float64)
        times = torch.tensor([_time(baseline, step, model.threads) for step in probes], dtype=torch.float64)
        fits[kind] = torch.linalg.lstsq(rows, times[:, None]).solution.flatten().clamp(min=1e-9).tolist()
    return fits


def _time(baseline: Local, step: StepBatch, threads: int) -> float:
    """With one thread, CPU time: on a shared core it is what wall time would be on one's own."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    baseline.step(step, 0.0)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        start = clock()
        baseline.step(step, 0.0)
        best_s = min(best_s, clock() - start)
    return best_s


def _step(kind: StepKind, batch: int, new: int, context: int, block_tokens: int, vocab: int) -> StepBatch:
    pages = -(-context // block_tokens)
    tokens = tuple(t % vocab for t in range(new))
    return StepBatch(
        kind,
        tuple(
            StepRequest(tokens, context - new, tuple(range(1 + b * pages, 1 + (b + 1) * pages))) for b in range(batch)
        ),
    )


def _features(step: StepBatch) -> Sequence[float]:
    attended = sum(len(r.tokens) * (r.start + r.context) / 2 for r in step.requests)
    return (1.0, float(step.num_tokens), float(attended))
