"""What timed steps attend to: real keys and values, each block at the position that it was computed for.

Blocks of any position would cost the same time. But a model answers a context without its first tokens, or one that is
out of order, chaotically: two right results were up to 1.08 times their RMS apart (SmolLM2, bfloat16), in order they
are within 0.07. No limit could have told wrong results from right ones.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.verify.executor import Executor, Local
from tkcc.verify.heads import NUM_HEADS, Heads, begin

NUM_SOURCES = 2
STAY_RATIO = 0.75  # of a context's blocks lie where such content lies already, the others anywhere


@dataclass(frozen=True, slots=True)
class Content:
    """Keys and values of some sequences from their first token on: block i of sequence s at s * num_blocks + i."""

    k_lnksd: Tensor
    v_lnksd: Tensor
    num_blocks: int  # of each sequence
    heads: Heads  # with which sequences begin


def make_content(
    baseline: Local, steps: Sequence[StepBatch], vocab_size: int, heads: Heads, chunk_tokens: int, seed: int
) -> Content:
    """Of random tokens, as long as the longest context of `steps`. The baseline's cache is overwritten."""
    S, rng = baseline.block_tokens, random.Random(seed)
    num_blocks = max(-(-request.context // S) for step in steps for request in step.requests)
    blocks = tuple(range(1, num_blocks + 1))
    keys, values = [], []
    for source in range(NUM_SOURCES):
        tokens = begin(heads, tuple(rng.randrange(vocab_size) for _ in range(num_blocks * S)), source)
        for start in range(0, len(tokens), chunk_tokens):
            chunk = tokens[start : start + chunk_tokens]
            row = StepRequest(chunk, start, blocks[: -(-(start + len(chunk)) // S)])
            baseline.step(StepBatch(StepKind.PREFILL, (row,)), 0.0)
        keys.append(baseline.kv.k_lnksd[:, 1 : num_blocks + 1].clone())
        values.append(baseline.kv.v_lnksd[:, 1 : num_blocks + 1].clone())
    return Content(torch.cat(keys, 1), torch.cat(values, 1), num_blocks, heads)


class Contexts:
    """The caches of some executors, kept equal: which block of which sequence lies in each of their blocks."""

    def __init__(self, content: Content, executors: Sequence[Executor], rng: random.Random) -> None:
        self._content, self._executors, self._rng = content, executors, rng
        total = executors[0].kv.k_lnksd.shape[1]
        self._block_tokens = executors[0].kv.k_lnksd.shape[3]
        self._free = range(1, total)
        self._holds: list[int | None] = [None] * total  # an index within its sequence; None: a step wrote there
        self._fill({block: block % content.num_blocks for block in self._free})

    def fresh(self, step: StepBatch, vocab_size: int) -> StepBatch:
        """The step with other tokens in other blocks; blocks that requests share stay shared.

        One of the blocks gets other content, so that nothing remembered about a block stays true.
        """
        where = self._places({block: i for r in step.requests for i, block in enumerate(r.blocks)})
        rng, S = self._rng, self._block_tokens
        requests = []
        for r in step.requests:
            blocks = tuple(where[block] for block in r.blocks)
            tokens = tuple(rng.randrange(vocab_size) for _ in r.tokens)
            if r.start == 0:
                tokens = begin(self._content.heads, tokens, rng.randrange(NUM_HEADS))
            requests.append(StepRequest(tokens, r.start, blocks))
            for block in blocks[r.start // S : -(-r.context // S)]:
                self._holds[block] = None  # it is about to be written
        return StepBatch(step.kind, tuple(requests))

    def _places(self, index_of: dict[int, int]) -> dict[int, int]:
        """Where each of the step's blocks lies from now on, its content put there."""
        rng = self._rng
        free = rng.sample(self._free, len(self._free))
        with_index: dict[int | None, list[int]] = {}
        for block in free:
            with_index.setdefault(self._holds[block], []).append(block)
        where = {}
        for block, index in index_of.items():
            if with_index.get(index) and rng.random() < STAY_RATIO:
                where[block] = with_index[index].pop()
        taken = set(where.values())
        others = iter([block for block in free if block not in taken])
        fill = {}
        for block, index in index_of.items():
            if block not in where:
                where[block] = next(others)
                fill[where[block]] = index
        changed = rng.choice(list(index_of))
        fill[where[changed]] = index_of[changed]
        self._fill(fill)
        return where

    def _fill(self, index_of: dict[int, int]) -> None:
        """Put block `index` of a random sequence into each block."""
        content = self._content
        blocks = torch.tensor(list(index_of))
        found = torch.tensor(
            [index + content.num_blocks * self._rng.randrange(NUM_SOURCES) for index in index_of.values()]
        )
        for executor in self._executors:
            for layer in range(content.k_lnksd.shape[0]):  # by layer: the gathered copy stays small
                executor.kv.k_lnksd[layer, blocks] = content.k_lnksd[layer, found]
                executor.kv.v_lnksd[layer, blocks] = content.v_lnksd[layer, found]
        for block, index in index_of.items():
            self._holds[block] = index
