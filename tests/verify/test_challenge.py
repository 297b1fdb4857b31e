"""The judge's own oracle: the baseline and a reordered twin pass on shapes of all kinds, subtle faults do not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tkcc.engine.step import StepBatch, StepKind
from tkcc.engine.tier.arena import Geometry
from tkcc.engine.tier.holder import is_norm
from tkcc.models.checkpoint import weight_shapes
from tkcc.models.forward import KVCache, ModelConfig
from tkcc.verify import challenge, correctness, errors
from tkcc.verify.challenge import ChallengeSet, ChallengeSize
from tkcc.verify.errors import Limits
from tkcc.verify.executor import Executor, Local, StepResult, kv_at, slots_of
from tkcc.verify.model import permuted

GEOMETRY = Geometry(max_requests=32, max_tokens=128, max_pages=64, num_blocks=260, block_tokens=8)
SIZE = ChallengeSize(long_tokens=150, prompt_tokens=(40, 21), decode_batches=(1, 3), block_tokens=8, max_step_tokens=64)
HEADS = ((1, 2, 3, 4), (5, 6, 7, 8))
PLAIN = ModelConfig(3, 64, 4, 2, 16, 96, 200, 1e-5, 10_000.0, 512, True)
ODD = replace(PLAIN, hidden_size=60, num_heads=5, num_kv_heads=1, head_dim=12, intermediate_size=77, vocab_size=131)
QWEN = replace(PLAIN, qk_norm=True, tie_word_embeddings=False)
LLAMA3 = replace(
    PLAIN,
    rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64.0,
    },
)  # fmt: skip


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(7)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=rng)
        if is_norm(name)
        else torch.randn(shape, generator=rng) / shape[-1] ** 0.5
        for name, shape in weight_shapes(config)
    }


@dataclass(frozen=True)
class Bench:
    config: ModelConfig
    weights: dict[str, Tensor]
    made: ChallengeSet
    limits: Limits

    def baseline(self, weights: dict[str, Tensor] | None = None) -> Local:
        return Local(self.config, weights or self.full(), torch.float32, GEOMETRY, 1)

    def full(self) -> dict[str, Tensor]:
        return {**self.weights, **self.made.norms}

    def failure(self, executor: Executor, seed: int = 3) -> str:
        run = correctness.run(executor, self.made, seed, 1.0)
        return errors.failure(run.errors, self.limits) or run.stray_write


def make_bench(config: ModelConfig) -> Bench:
    weights = random_weights(config)
    norms = {name: w for name, w in weights.items() if is_norm(name)}
    rest = {name: w for name, w in weights.items() if not is_norm(name)}
    made = challenge.make(config, rest, norms, torch.float32, SIZE, HEADS, seed=11)
    full = {**weights, **made.norms}
    runs = [
        correctness.run(Local(config, w, torch.float32, GEOMETRY, 1), made, 5, 1.0).errors
        for w in (full, permuted(full, config, 1))
    ]
    limits = errors.limits(errors.worst(runs), *correctness.scales(made), torch.float32)
    return Bench(config, weights, made, limits)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return make_bench(PLAIN)


@pytest.mark.parametrize("config", [PLAIN, ODD, QWEN, LLAMA3], ids=["plain", "odd sizes", "qk norm", "llama3 rope"])
def test_the_baseline_and_reordered_builds_pass(config: ModelConfig) -> None:
    made = make_bench(config)
    assert made.failure(made.baseline()) == ""
    for seed in (2, 3, 4):
        assert made.failure(made.baseline(permuted(made.full(), config, seed))) == ""


def test_at_least_256_positions_are_pooled_at_every_width_of_the_workload(bench: Bench) -> None:
    run = correctness.run(bench.baseline(), bench.made, 3, 1.0)
    widths = {len(step.rows) for step in bench.made.plan if step.kind is StepKind.DECODE}
    assert run.errors.positions >= 256 and {1, 3} <= widths


def test_a_plan_has_chunks_shared_pages_moves_and_padding(bench: Bench) -> None:
    plan = bench.made.plan
    prefills = [row for step in plan if step.kind is StepKind.PREFILL for row in step.rows]
    assert any(row.start for row in prefills if row.sequence == 0), "a chunk"
    assert bench.made.shared and any(step.move_pages for step in plan) and any(step.extra_pages for step in plan)
    assert any(len(step.rows) > 1 for step in plan if step.kind is StepKind.PREFILL), "a ragged prefill"


def test_sequences_begin_as_the_model_can_bear_it(bench: Bench) -> None:
    assert {tuple(tokens[:4].tolist()) for tokens in bench.made.sequences} == set(HEADS)


@pytest.mark.parametrize("seed", range(4))
def test_no_step_is_wider_than_the_engine_makes_them(bench: Bench, seed: int) -> None:
    near_the_limit = replace(SIZE, prompt_tokens=(62, 64))
    norms = {name: w for name, w in bench.weights.items() if is_norm(name)}
    rest = {name: w for name, w in bench.weights.items() if not is_norm(name)}
    made = challenge.make(PLAIN, rest, norms, torch.float32, near_the_limit, HEADS, seed)
    widths = [sum(row.end - row.start for row in step.rows) for step in made.plan]
    assert max(widths) <= near_the_limit.max_step_tokens


Tamper = Callable[[StepBatch, Tensor, KVCache], Tensor]


class Tampered:
    """A right executor, but for what `tamper` does after each step; what it returns is shown as the logits."""

    def __init__(self, inner: Local, tamper: Tamper, before: Callable[[KVCache], None] = lambda kv: None) -> None:
        self.inner, self.tamper, self.before = inner, tamper, before
        self.kv = inner.kv

    def step(self, step: StepBatch, timeout_s: float, extra_pages: int = 0, reuse_inputs: bool = False) -> StepResult:
        self.before(self.kv)
        result = self.inner.step(step, timeout_s, extra_pages, reuse_inputs)
        return StepResult(self.tamper(step, result.logits_bv, self.kv), result.elapsed_s)


class LateValues:
    """Writes the newest V of the last layer at the start of the next step only: all logits are right."""

    def __init__(self) -> None:
        self.owed: tuple[Tensor, Tensor] | None = None

    def tamper(self, step: StepBatch, logits_bv: Tensor, kv: KVCache) -> Tensor:
        slots = slots_of(step, 8)
        self.owed = (slots, kv.v_lnksd[-1, slots // 8, :, slots % 8].clone())
        kv.v_lnksd[-1, slots // 8, :, slots % 8] *= 1.001
        return logits_bv

    def before(self, kv: KVCache) -> None:
        if self.owed is not None:
            slots, v = self.owed
            kv.v_lnksd[-1, slots // 8, :, slots % 8] = v


def test_values_that_are_written_late_are_found(bench: Bench) -> None:
    late = LateValues()
    # without moves, which would take the missing values elsewhere and so spoil logits too
    plan = tuple(replace(step, move_pages=False) for step in bench.made.plan)
    still = replace(bench, made=replace(bench.made, plan=plan))
    assert "KV error" in still.failure(Tampered(bench.baseline(), late.tamper, late.before))


def _tail_is_shifted(step: StepBatch, logits_bv: Tensor, kv: KVCache) -> Tensor:
    """The right argmax with wrong logits elsewhere."""
    logits_bv = logits_bv.clone()
    logits_bv[:, -5:] -= 0.01
    return logits_bv


def _one_row_of_many(step: StepBatch, logits_bv: Tensor, kv: KVCache) -> Tensor:
    logits_bv = logits_bv.clone()
    if len(logits_bv) > 8:
        logits_bv[-1] = logits_bv[0]
    return logits_bv


def _stray(step: StepBatch, logits_bv: Tensor, kv: KVCache) -> Tensor:
    used = {block for request in step.requests for block in request.blocks}
    block = next(b for b in range(1, kv.k_lnksd.shape[1]) if b not in used)
    kv.k_lnksd[:, block] += 1
    return logits_bv


@pytest.mark.parametrize(
    "tamper, reason",
    [
        (_tail_is_shifted, "logit error"),
        (_one_row_of_many, "logit error"),
        (_stray, ""),
    ],
)
def test_subtle_faults_are_found(bench: Bench, tamper: Tamper, reason: str) -> None:
    failure = bench.failure(Tampered(bench.baseline(), tamper))
    assert failure and reason in failure


def test_a_write_to_blocks_that_nobody_owns_is_found(bench: Bench) -> None:
    made = bench.baseline()
    place = correctness.Placement(made.kv, bench.made, 3)
    assert place.stray_write() == ""
    made.kv.k_lnksd[1, place.free[0], 0, 0, 0] += 1e-3
    assert f"K of block {place.free[0]}" in place.stray_write()


def test_norm_weights_of_every_set_are_new(bench: Bench) -> None:
    name = "model.layers.0.input_layernorm.weight"
    ratio = bench.made.norms[name] / bench.weights[name]
    assert ratio.std() > 0.05 and float(ratio.min()) > 0.79 and float(ratio.max()) < 1.21
    assert bench.failure(bench.baseline(bench.weights)), "the old norm weights must not pass"


def test_slots_and_kv_agree_on_where_a_token_is() -> None:
    kv = KVCache(torch.zeros(2, 4, 1, 8, 3), torch.zeros(2, 4, 1, 8, 3))
    kv.k_lnksd[1, 2, 0, 5] = 9.0
    k_tlkd, _ = kv_at(kv, torch.tensor([2 * 8 + 5]))
    assert k_tlkd.shape == (1, 2, 1, 3) and float(k_tlkd[0, 1, 0, 0]) == 9.0 and float(k_tlkd[0, 0].sum()) == 0.0
