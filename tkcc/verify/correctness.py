"""Runs a challenge set on an executor and measures how far every output is from the truth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tkcc.models.forward import KVCache
from tkcc.verify import errors
from tkcc.verify.challenge import GARBAGE_SCALE, ChallengeSet, step_batch
from tkcc.verify.errors import Errors
from tkcc.verify.executor import Executor, kv_at


@dataclass(frozen=True, slots=True)
class ChallengeRun:
    errors: Errors
    stray_write: str  # a block that nobody owned and that was written; empty if none
    step_s: tuple[float, ...]


class Placement:
    """Which blocks each sequence has, and garbage in all others. Private: drawn anew for every run."""

    def __init__(self, kv: KVCache, challenge: ChallengeSet, seed: int) -> None:
        self.kv = kv
        self.block_tokens = kv.k_lnksd.shape[3]
        self.rng = torch.Generator().manual_seed(seed)
        num_blocks = kv.k_lnksd.shape[1]
        needed = 2 * sum(self._blocks_for(len(s)) for s in challenge.sequences) + 2
        assert needed < num_blocks, (needed, num_blocks)
        free = (1 + torch.randperm(num_blocks - 1, generator=self.rng)).tolist()
        self.free: list[int] = free[:needed]
        block_shape = (kv.k_lnksd.shape[0], 1, *kv.k_lnksd.shape[2:])
        self.garbage_k, self.garbage_v = (
            (GARBAGE_SCALE * torch.randn(block_shape, generator=self.rng)).to(kv.k_lnksd.dtype) for _ in range(2)
        )
        self.litter([0, *self.free])
        self.pages: list[list[int]] = []
        owners = {sequence: (owner, n) for sequence, owner, n in challenge.shared}
        for i, tokens in enumerate(challenge.sequences):
            owner, shared = owners.get(i, (0, 0))
            head = self.pages[owner][: shared // self.block_tokens] if shared else []
            self.pages.append(head + self._take(self._blocks_for(len(tokens)) - len(head)))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def litter(self, blocks: Sequence[int]) -> None:
        self.kv.k_lnksd[:, blocks] = self.garbage_k
        self.kv.v_lnksd[:, blocks] = self.garbage_v

    def move(self) -> None:
        """Every block of every sequence goes elsewhere; what it leaves is garbage again."""
        old = sorted({page for pages in self.pages for page in pages})
        new = self._take(len(old))
        self.kv.k_lnksd[:, new] = self.kv.k_lnksd[:, old]
        self.kv.v_lnksd[:, new] = self.kv.v_lnksd[:, old]
        where = dict(zip(old, new, strict=True))
        self.pages = [[where[page] for page in pages] for pages in self.pages]
        self.litter(old)
        self.free += old

    def stray_write(self) -> str:
        """A free block that is not as it was left."""
        for name, cache, garbage in (("K", self.kv.k_lnksd, self.garbage_k), ("V", self.kv.v_lnksd, self.garbage_v)):
            changed_n = (cache[:, self.free] != garbage).flatten(2).any(-1).any(0)
            if bool(changed_n.any()):
                return f"{name} of block {self.free[int(changed_n.nonzero()[0])]}, which no request owned, was written"
        return ""


def run(executor: Executor, challenge: ChallengeSet, seed: int, timeout_s: float) -> ChallengeRun:
    """Feed the whole plan. Raises what the executor raises."""
    place = Placement(executor.kv, challenge, seed)
    offsets = _offsets(challenge)
    layers = challenge.truth.k_lnkd.shape[0]
    logits_errors: list[Tensor] = []
    kv_l = torch.zeros(layers, dtype=torch.float64)
    step_s = []
    row = 0
    for planned in challenge.plan:
        if planned.move_pages:
            place.move()
        step = step_batch(challenge, planned, place.pages)
        result = executor.step(step, timeout_s, planned.extra_pages, planned.reuse_inputs)
        step_s.append(result.elapsed_s)
        rows = len(planned.rows)
        logits_errors.append(errors.position_errors(result.logits_bv, challenge.truth.logits_wv[row : row + rows]))
        row += rows
        spans = [(r.sequence, r.start, r.end) for r in planned.rows]
        kv_l = _larger(kv_l, _kv_errors(executor.kv, challenge, place, offsets, spans))
    everything = [(i, 0, len(tokens)) for i, tokens in enumerate(challenge.sequences)]
    kv_l = _larger(kv_l, _kv_errors(executor.kv, challenge, place, offsets, everything))
    found = Errors(errors.spread(torch.cat(logits_errors)), row, tuple(kv_l.tolist()))
    return ChallengeRun(found, place.stray_write(), tuple(step_s))


def scales(challenge: ChallengeSet) -> tuple[float, tuple[float, ...]]:
    """RMS of the true logits, and of K and V by layer."""
    truth = challenge.truth
    kv = torch.stack((truth.k_lnkd, truth.v_lnkd)).double().square().mean((0, 2, 3, 4)).sqrt()
    return errors.rms(truth.logits_wv), tuple(kv.tolist())


def _larger(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise maximum in which NaN wins."""
    return torch.maximum(a, b)


def _offsets(challenge: ChallengeSet) -> list[int]:
    offsets, at = [], 0
    for tokens in challenge.sequences:
        offsets.append(at)
        at += len(tokens)
    return offsets


def _kv_errors(
    kv: KVCache, challenge: ChallengeSet, place: Placement, offsets: list[int], spans: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Largest error by layer over positions start .. end - 1 of the given sequences, [L]."""
    S = place.block_tokens
    slots = [place.pages[s][p // S] * S + p % S for s, a, b in spans for p in range(a, b)]
    index_n = torch.tensor([offsets[s] + p for s, a, b in spans for p in range(a, b)])
    k_nlkd, v_nlkd = kv_at(kv, torch.tensor(slots))
    truth = challenge.truth
    worst_l = torch.zeros(truth.k_lnkd.shape[0], dtype=torch.float64)
    for found_nlkd, true_lnkd in ((k_nlkd, truth.k_lnkd), (v_nlkd, truth.v_lnkd)):
        error = (found_nlkd.to(true_lnkd.dtype) - true_lnkd[:, index_n].transpose(0, 1)).abs().amax((0, 2, 3))
        worst_l = torch.maximum(worst_l, error.double())
    return worst_l
