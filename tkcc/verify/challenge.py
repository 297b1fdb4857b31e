"""Private challenges: token sequences, the steps that feed them, and what a right forward pass must produce.

One set is used for one candidate. It is made from a secret seed after the candidate's source is fixed, and covers in
one plan: ragged prefills, prefixes already in the cache, chunks, shared prefix pages, decode at every batch size of the
workload, permuted rows, permuted and moved pages, padded page tables, garbage in every slot that means nothing, and
norm weights that no candidate has seen. Every output is compared with the reference, so each of these is a check.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.models.forward import ModelConfig
from tkcc.verify import reference
from tkcc.verify.heads import NUM_HEADS, Heads, begin
from tkcc.verify.reference import Truth

MIN_POSITIONS = 256
STEPS_PER_WIDTH = 4
WIDE = 16  # rows of the steps that make up the number of positions cheaply
NORM_SPREAD = 0.2  # norm weights are multiplied by 1 +- this
GARBAGE_SCALE = 3.0  # of slots that mean nothing: finite, as stale memory is, but never negligible

COVERED = (
    "ragged prefill",
    "cached prefix",
    "chunked prefill",
    "shared prefix pages",
    "row permutation",
    "page permutation",
    "moved pages",
    "page-table padding",
    "garbage beyond the context",
    "weight perturbation",
    "reused input addresses",
    "no write to other pages",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: positions start .. end - 1 are new."""

    sequence: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    kind: StepKind
    rows: tuple[Row, ...]
    extra_pages: int = 0  # of scratch padding behind each page table
    reuse_inputs: bool = False
    move_pages: bool = False  # before it, every sequence is moved to other blocks


@dataclass(frozen=True, slots=True)
class ChallengeSet:
    sequences: tuple[Tensor, ...]  # token ids, int64
    shared: tuple[
        tuple[int, int, int], ...
    ]  # (sequence, owner, tokens): its first tokens are the owner's, and so its pages
    plan: tuple[PlannedStep, ...]
    wanted: tuple[tuple[int, int], ...]  # (sequence, position) of each logits row, in the plan's order
    norms: Mapping[str, Tensor]
    truth: Truth

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class ChallengeSize:
    """How long and wide challenges may be; from the workload's cells and the tier's cost of the reference."""

    long_tokens: int  # the longest sequence
    prompt_tokens: tuple[int, ...]  # typical prompts
    decode_batches: tuple[int, ...]  # batch sizes to decode at
    block_tokens: int
    max_step_tokens: int


def make(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    norms: Mapping[str, Tensor],
    dtype: torch.dtype,
    size: ChallengeSize,
    heads: Heads,
    seed: int,
) -> ChallengeSet:
    """A new set with its truth. Slow: the reference runs here."""
    rng = torch.Generator().manual_seed(seed)
    norms = {
        name: (w.double() * (1 + NORM_SPREAD * (2 * torch.rand(w.shape, generator=rng) - 1))).to(w.dtype)
        for name, w in norms.items()
    }
    planner = _Planner(config, size, heads, rng)
    plan = planner.plan()
    wanted = tuple((row.sequence, row.end - 1) for step in plan for row in step.rows)
    sequences = tuple(planner.sequences)
    one_above = reference.ONE_ABOVE[dtype]
    truth = reference.run(config, {**weights, **norms}, one_above, sequences, wanted)
    return ChallengeSet(sequences, tuple(planner.shared), plan, wanted, norms, truth)


def decode_widths(decode_batches: Sequence[int]) -> list[int]:
    """How many rows each decode step has: a few at each of the workload's widths, and wide ones up to MIN_POSITIONS."""
    widths = [width for width in decode_batches for _ in range(STEPS_PER_WIDTH)]
    return widths + [WIDE] * -(-max(0, MIN_POSITIONS - sum(widths)) // WIDE)


class _Planner:
    """Draws sequences and the steps that feed them. Prompts are fed by prefill, what follows by decode."""

    def __init__(self, config: ModelConfig, size: ChallengeSize, heads: Heads, rng: torch.Generator) -> None:
        self.config, self.size, self.heads, self.rng = config, size, heads, rng
        self.sequences: list[Tensor] = []
        self.shared: list[tuple[int, int, int]] = []

    def _int(self, low: int, high: int) -> int:
        """Uniform in low .. high."""
        return int(torch.randint(low, max(low, high) + 1, (1,), generator=self.rng))

    def _tokens(self, n: int) -> Tensor:
        return torch.randint(0, self.config.vocab_size, (n,), generator=self.rng)

    def _sequence(self, n: int) -> Tensor:
        tokens = tuple(self._tokens(n).tolist())
        return torch.tensor(begin(self.heads, tokens, self._int(0, NUM_HEADS - 1)))

    def plan(self) -> tuple[PlannedStep, ...]:
        size = self.size
        widths = decode_widths(size.decode_batches)
        prompts = [size.long_tokens, *(self._near(n) for n in size.prompt_tokens)]
        while len(prompts) < max(widths):
            prompts.append(self._int(1, 2 * size.block_tokens + 3))
        self.sequences = [self._sequence(n + len(widths)) for n in prompts]
        self._share_a_prefix(prompts)
        return (*self._prefills(prompts), *self._decodes(prompts, widths))

    def _near(self, n: int) -> int:
        """A prompt of about n tokens that one step can take; the long one is there for chunks."""
        return min(self._int(max(1, n - n // 8), n + n // 8), self.size.long_tokens, self.size.max_step_tokens)

    def _share_a_prefix(self, prompts: list[int]) -> None:
        """The last sequence starts with the first one's first blocks."""
        S = self.size.block_tokens
        blocks = min(2, (prompts[0] - 1) // S)
        if blocks and len(prompts) > 1:
            n, last = blocks * S, len(prompts) - 1
            if prompts[last] <= n:
                grow = n + 1 + self._int(0, S) - prompts[last]
                self.sequences[last] = torch.cat((self.sequences[last], self._tokens(grow)))
                prompts[last] += grow
            self.sequences[last][:n] = self.sequences[0][:n]
            self.shared.append((last, 0, n))

    def _prefills(self, prompts: list[int]) -> list[PlannedStep]:
        """The long prompt in two chunks, the rest ragged in as few steps as fit; shared prefixes are cached."""
        cut = self._int(1, prompts[0] - 1) if prompts[0] > 1 else 0
        chunks = [(0, cut), (cut, prompts[0])] if cut else [(0, prompts[0])]
        steps = [
            PlannedStep(StepKind.PREFILL, (Row(0, a + i, min(a + i + self.size.max_step_tokens, b)),))
            for a, b in chunks
            for i in range(0, b - a, self.size.max_step_tokens)
        ]
        cached = {sequence: n for sequence, _, n in self.shared}
        rows: list[Row] = []
        for s in self._order(range(1, len(prompts))):
            row = Row(s, cached.get(s, 0), prompts[s])
            if rows and sum(r.end - r.start for r in (*rows, row)) > self.size.max_step_tokens:
                steps.append(PlannedStep(StepKind.PREFILL, tuple(rows), extra_pages=self._int(0, 2)))
                rows = []
            rows.append(row)
        if rows:
            steps.append(PlannedStep(StepKind.PREFILL, tuple(rows), extra_pages=self._int(0, 2)))
        return steps

    def _decodes(self, prompts: list[int], widths: list[int]) -> list[PlannedStep]:
        at = list(prompts)
        steps: list[PlannedStep] = []
        for i in self._order(range(len(widths))):
            chosen = self._order(range(len(prompts)))[: widths[i]]
            rows = tuple(Row(s, at[s], at[s] + 1) for s in chosen)
            for s in chosen:
                at[s] += 1
            steps.append(
                PlannedStep(
                    StepKind.DECODE,
                    rows,
                    extra_pages=self._int(0, 2),
                    reuse_inputs=bool(self._int(0, 1)),
                    move_pages=len(steps) % 8 == 4,
                )
            )
        self.sequences = [s[:n] for s, n in zip(self.sequences, at, strict=True)]  # the rest was never fed
        return steps

    def _order(self, items: Sequence[int]) -> list[int]:
        return [items[i] for i in torch.randperm(len(items), generator=self.rng).tolist()]


def step_batch(challenge: ChallengeSet, planned: PlannedStep, pages: Sequence[Sequence[int]]) -> StepBatch:
    """The step over the given page tables (blocks of each sequence, in order)."""
    return StepBatch(
        planned.kind,
        tuple(
            StepRequest(
                tokens=tuple(challenge.sequences[row.sequence][row.start : row.end].tolist()),
                start=row.start,
                blocks=tuple(pages[row.sequence]),
            )
            for row in planned.rows
        ),
    )
