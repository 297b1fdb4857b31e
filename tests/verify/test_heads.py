"""Which beginnings are kept: those on which the baseline is near the reference."""

import torch

from tests.verify.test_challenge import GEOMETRY, PLAIN, random_weights
from tkcc.engine.step import StepBatch
from tkcc.engine.tier.holder import is_norm
from tkcc.verify import heads
from tkcc.verify.executor import Local, StepResult
from tkcc.verify.model import TierModel


class Touchy(Local):
    """Far off on every sequence that begins with an odd token."""

    def step(self, step: StepBatch, timeout_s: float, extra_pages: int = 0, reuse_inputs: bool = False) -> StepResult:
        result = super().step(step, timeout_s, extra_pages, reuse_inputs)
        for request in step.requests:
            if request.tokens[0] % 2:
                self.kv.v_lnksd[-1, request.blocks[0]] += 1
        return result


def test_beginnings_that_the_baseline_cannot_bear_are_not_used() -> None:
    weights = random_weights(PLAIN)
    model = TierModel(
        config=PLAIN,
        full_layers=PLAIN.num_layers,
        dtype_name="float32",
        threads=1,
        weights={name: w for name, w in weights.items() if not is_norm(name)},
        norms={name: w for name, w in weights.items() if is_norm(name)},
        norms_fd=-1,
    )
    with torch.inference_mode():
        found = heads.find(model, Touchy(PLAIN, weights, torch.float32, GEOMETRY, 1), 5)
    assert len(set(found)) == heads.NUM_HEADS and all(len(head) == heads.HEAD_TOKENS for head in found)
    assert not any(head[0] % 2 for head in found)


def test_a_sequence_shorter_than_a_head_stays_as_short() -> None:
    assert heads.begin(((1, 2, 3),), (9,), 7) == (1,)
    assert heads.begin(((1, 2, 3), (4, 5, 6)), (9, 9, 9, 8), 3) == (4, 5, 6, 8)
