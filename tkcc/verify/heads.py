"""How sequences of random tokens begin: with tokens after which the model rounds as it does in service.

The first tokens of a sequence decide where a model's attention sinks form. On random ones that is often a close call,
and the last bit of a sum turns it: keys and values of two right results were then up to 12 times their RMS apart, with
the reference between them (SmolLM2, bfloat16, one sequence in fifty). What users send begins as the model was trained;
here, beginnings are drawn, and those kept on which the baseline is nearest to the reference.
"""

import random
from collections.abc import Sequence

import torch

from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.verify import errors, reference
from tkcc.verify.executor import Local, kv_at, slots_of
from tkcc.verify.model import TierModel

HEAD_TOKENS = 4  # few: what is always the same can be remembered
NUM_HEADS = 16
DRAWN_PER_HEAD = 3
TRIAL_TOKENS = 12  # a head, and what its sinks do to the tokens behind it

Heads = Sequence[tuple[int, ...]]


def find(model: TierModel, baseline: Local, seed: int) -> Heads:
    """The baseline's cache is overwritten."""
    rng, S = random.Random(seed), baseline.block_tokens
    vocab = model.config.vocab_size
    drawn = [tuple(rng.randrange(vocab) for _ in range(TRIAL_TOKENS)) for _ in range(DRAWN_PER_HEAD * NUM_HEADS)]
    dtype = reference.ONE_ABOVE[model.dtype]
    truth = reference.run(model.config, model.everything, dtype, [torch.tensor(tokens) for tokens in drawn], [])
    pages = -(-TRIAL_TOKENS // S)
    at_once = (baseline.kv.k_lnksd.shape[1] - 1) // pages
    off: list[float] = []
    for first in range(0, len(drawn), at_once):
        group = drawn[first : first + at_once]
        blocks = [tuple(range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(len(group))]
        rows = tuple(StepRequest(tokens, 0, own) for tokens, own in zip(group, blocks, strict=True))
        step = StepBatch(StepKind.PREFILL, rows)
        baseline.step(step, 0.0)
        at = slice(first * TRIAL_TOKENS, (first + len(group)) * TRIAL_TOKENS)
        apart = [
            (found_tlkd.transpose(0, 1) - truth_lnkd[:, at]).abs().amax((0, 2, 3)) / errors.rms(truth_lnkd)
            for found_tlkd, truth_lnkd in zip(
                kv_at(baseline.kv, slots_of(step, S)), (truth.k_lnkd, truth.v_lnkd), strict=True
            )
        ]
        off += torch.maximum(*apart).view(len(group), TRIAL_TOKENS).amax(1).tolist()
    ranked = sorted(zip(off, drawn, strict=True))
    return [tokens[:HEAD_TOKENS] for _, tokens in ranked[:NUM_HEADS]]


def begin(heads: Heads, tokens: tuple[int, ...], which: int) -> tuple[int, ...]:
    """The tokens of a sequence from its first one on, beginning with one of the heads."""
    head = heads[which % len(heads)]
    return head[: len(tokens)] + tokens[len(head) :]
