"""From a recorded workload to what the judge measures: cells, the size of challenges, and the memory that both need."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tkcc.api.workload import Recording
from tkcc.engine.serve.scheduler import SchedulerConfig
from tkcc.engine.step import StepBatch, StepKind
from tkcc.engine.tier.arena import Geometry
from tkcc.models.forward import ModelConfig
from tkcc.verify.cells import TimedCell, make_cells
from tkcc.verify.challenge import ChallengeSize, decode_widths
from tkcc.verify.replay import replay

CHUNK_TOKENS = SchedulerConfig().chunk_tokens  # of the widest prefill step
MAX_REPLAY_STEPS = 20_000
SPARE_BLOCKS_RATIO = 1.6  # blocks of a runner's cache beyond the widest step: room for fresh page tables


@dataclass(frozen=True, slots=True)
class Plan:
    """What one workload asks of runners and judge."""

    cells: tuple[TimedCell, ...]
    num_steps: int
    challenge: ChallengeSize
    geometry: Geometry

    def describe(self) -> dict[str, Any]:
        """What the supervisor is told."""
        cells = [cell.describe() for cell in self.cells]
        return {"cells": cells, "steps": self.num_steps, "geometry": asdict(self.geometry)}


def make_plan(
    config: ModelConfig, recording: Recording, max_positions: int, cost_s: Callable[[StepBatch], float],
    challenge_tokens: int, seed: int,
) -> Plan:  # fmt: skip
    """challenge_tokens: how many tokens the reference may take per challenge set."""
    steps = list(replay(recording, config.vocab_size, max_positions, cost_s, MAX_REPLAY_STEPS))
    cells = make_cells(steps, seed)
    size = _challenge_size(cells, recording.block_tokens, max_positions, challenge_tokens)
    return Plan(cells, len(steps), size, _geometry(cells, size, max_positions))


def _challenge_size(
    cells: tuple[TimedCell, ...], block_tokens: int, max_positions: int, budget_tokens: int
) -> ChallengeSize:
    contexts = [r.context for cell in cells for step in cell.steps for r in step.requests]
    widths = {len(step.requests) for cell in cells for step in cell.steps if step.kind is StepKind.DECODE} or {1}
    decode_batches = tuple(sorted({1, max(widths), sorted(widths)[len(widths) // 2]}))
    room = max_positions - len(decode_widths(decode_batches)) - 1
    long_tokens = max(1, min(max(contexts), room, budget_tokens // 2))
    prompts = [cell.cell.context_tokens for cell in cells if cell.cell.phase == StepKind.PREFILL] or [2 * block_tokens]
    left = max(1, budget_tokens // 2)
    chosen = []
    for n in sorted(prompts)[:3]:
        n = max(1, min(n, long_tokens, left // 2))
        chosen.append(n)
        left -= n
    return ChallengeSize(long_tokens, tuple(chosen), decode_batches, block_tokens, CHUNK_TOKENS)


def _geometry(cells: tuple[TimedCell, ...], size: ChallengeSize, max_positions: int) -> Geometry:
    S = size.block_tokens
    steps = [step for cell in cells for step in cell.steps]
    widest = max(len({b for r in step.requests for b in r.blocks}) for step in steps)
    width = max(decode_widths(size.decode_batches))
    rows = max(*(len(step.requests) for step in steps), width, len(size.prompt_tokens) + width + 2)
    longest = max(*(r.context for step in steps for r in step.requests), max_positions)
    sequences = (
        size.long_tokens
        + sum(2 * n for n in size.prompt_tokens)
        + width * (3 * S + len(decode_widths(size.decode_batches)))
    )
    challenge_blocks = 2 * (sequences // S + 2 * rows) + 4
    return Geometry(
        max_requests=rows,
        max_tokens=max(CHUNK_TOKENS, *(step.num_tokens for step in steps)),
        max_pages=-(-longest // S) + 4,
        num_blocks=max(int(widest * SPARE_BLOCKS_RATIO) + 8, challenge_blocks),
        block_tokens=S,
    )
