"""Recorded requests become steps as serving makes them, and steps become cells that stand for all of the time."""

import pytest

from tkcc.api.workload import RecordedRequest, Recording
from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.verify.cells import make_cells
from tkcc.verify.replay import replay

VOCAB = 1000


def steps(*requests: RecordedRequest, cost_s: float = 0.01, most: int = 1000) -> list[tuple[StepBatch, float]]:
    return list(replay(Recording(16, "recorded", requests), VOCAB, 2048, lambda step: cost_s, most))


def prompt_steps(found: list[tuple[StepBatch, float]]) -> list[StepRequest]:
    return [r for step, _ in found if step.kind is StepKind.PREFILL for r in step.requests]


def test_a_request_is_prefilled_once_and_decoded_token_by_token() -> None:
    found = steps(RecordedRequest(0, 40, 5, 0))
    assert [step.kind for step, _ in found] == [StepKind.PREFILL, *[StepKind.DECODE] * 4]
    assert [step.requests[0].context for step, _ in found] == [40, 41, 42, 43, 44]


def test_what_was_cached_in_service_is_not_computed_again() -> None:
    (request,) = prompt_steps(steps(RecordedRequest(0, 70, 1, 48, (1, 2, 3, 4))))
    assert (request.start, len(request.tokens), len(request.blocks)) == (48, 22, 5)


def test_equal_hashes_are_equal_blocks_of_a_step() -> None:
    a, b = RecordedRequest(0, 40, 9, 0, (1, 2)), RecordedRequest(0, 40, 9, 0, (1, 3))
    found = steps(a, b, RecordedRequest(0, 40, 9, 32, (1, 2)))
    third = prompt_steps(found)[-1]
    first = prompt_steps(found)[0]
    assert third.start == 32 and third.blocks[:2] == first.blocks[:2]
    decode = next(step for step, _ in found if len(step.requests) == 3)
    assert decode.requests[0].blocks[0] == decode.requests[2].blocks[0] != decode.requests[0].blocks[1]


def test_long_prompts_go_in_chunks() -> None:
    parts = [len(r.tokens) for r in prompt_steps(steps(RecordedRequest(0, 1200, 1, 0)))]
    assert parts == [512, 512, 176]


def test_arrivals_and_costs_make_the_batch() -> None:
    slow = steps(*[RecordedRequest(100 * i, 8, 20, 0) for i in range(6)], cost_s=0.1)
    fast = steps(*[RecordedRequest(100 * i, 8, 20, 0) for i in range(6)], cost_s=0.001)
    assert max(len(s.requests) for s, _ in slow) == 6 and max(len(s.requests) for s, _ in fast) == 1


def test_requests_longer_than_the_model_are_cut_and_steps_are_bounded() -> None:
    found = steps(RecordedRequest(0, 5000, 5000, 4999), most=30)
    assert len(found) <= 30 and max(r.context for s, _ in found for r in s.requests) <= 2048


def decode(batch: int, context: int) -> StepBatch:
    return StepBatch(StepKind.DECODE, tuple(StepRequest((1,), context - 1, (1,)) for _ in range(batch)))


def prefill(new: int, cached: int = 0) -> StepBatch:
    return StepBatch(StepKind.PREFILL, (StepRequest((1,) * new, cached, (1,)),))


def test_cells_stand_for_all_of_the_time_by_phase() -> None:
    stream = [(decode(1, 100), 1.0)] * 30 + [(decode(4, 100), 2.0)] * 10 + [(prefill(128), 5.0)] * 10
    cells = make_cells(stream, 0)
    weights = {(c.cell.phase, c.cell.batch): c.cell.weight_ratio for c in cells}
    assert weights == pytest.approx({("decode", 1): 0.3, ("decode", 4): 0.2, ("prefill", 1): 0.5})


def test_no_more_cells_than_cover_most_of_a_phase() -> None:
    stream = [(decode(1, 100), 1.0)] * 60 + [(decode(8, 100), 1.0)] * 20 + [(decode(1, 900), 1.0)] * 20
    assert [round(c.cell.weight_ratio, 2) for c in make_cells(stream, 0)] == [0.75, 0.25]


def test_rare_cells_count_with_the_heavy_ones_of_their_phase() -> None:
    stream = [(decode(2**i, 100), 1.0) for i in range(6) for _ in range(10 + i)] + [(prefill(64), 10.0)] * 5
    cells = make_cells(stream, 0)
    assert sum(c.cell.weight_ratio for c in cells) == pytest.approx(1.0)
    assert sum(c.cell.weight_ratio for c in cells if c.cell.phase == "prefill") == pytest.approx(50 / 125)
    assert sum(c.count for c in cells if c.cell.phase == "decode") == pytest.approx(75)


def test_a_phase_that_takes_next_to_nothing_is_left_out() -> None:
    cells = make_cells([(decode(1, 100), 1.0)] * 100 + [(prefill(8), 0.5)], 0)
    assert {c.cell.phase for c in cells} == {"decode"}


def test_prefills_with_and_without_a_cached_prefix_are_cells_of_their_own() -> None:
    cells = make_cells([(prefill(64), 1.0), (prefill(64, 512), 1.0), (decode(1, 9), 1.0)] * 9, 0)
    assert {(c.cell.phase, c.cell.context_tokens) for c in cells} == {("prefill", 64), ("prefill", 576), ("decode", 9)}


def test_a_cell_keeps_real_steps_and_a_bounded_number_of_them() -> None:
    stream = [(decode(1, 65 + i % 60), 1.0) for i in range(500)]
    (cell,) = make_cells(stream, 0)
    assert 1 < len(cell.steps) <= 24 and all(step in {s for s, _ in stream} for step in cell.steps)
