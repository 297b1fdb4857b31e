"""The scheduler against a model that needs no torch: the next token is a hash of the whole context, read out of fake KV
blocks. A wrong block, a stale prefix or a lost token therefore changes the text."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tkcc.engine.serve.kv_blocks import BlockPool
from tkcc.engine.serve.request import FinishReason, Request, SampledToken, SamplingParams
from tkcc.engine.serve.scheduler import Scheduler, SchedulerConfig
from tkcc.engine.step import StepKind

S = 4


class FakeModel:
    """Its KV cache holds the tokens themselves, so what a step sees is what its page table leads to."""

    def __init__(self):
        self.slots = {}

    def run(self, step):
        tokens = []
        for part, samples in zip(step.batch.requests, step.samples, strict=True):
            for i, token in enumerate(part.tokens):
                self.slots[self._slot(part, part.start + i)] = token
            context = [self.slots[self._slot(part, p)] for p in range(part.context)]
            tokens.append(SampledToken(next_token(context)) if samples else None)
        return tokens

    def _slot(self, part, position):
        return part.blocks[position // S], position % S


def next_token(context):
    return hash(tuple(context)) % 97


def expected(prompt, count, stops=frozenset()):
    context = list(prompt)
    while len(context) < len(prompt) + count:
        context.append(next_token(context))
        if context[-1] in stops:
            break
    return context[len(prompt) :]


def make(num_blocks=32, **config):
    pool = BlockPool(num_blocks)
    return Scheduler(SchedulerConfig(block_tokens=S, **config), pool), FakeModel()


def request(name, prompt, count=4, stops=frozenset()):
    return Request(name, tuple(prompt), SamplingParams(max_new_tokens=count, stop_token_ids=stops))


def step(scheduler, model):
    scheduled = scheduler.schedule()
    if scheduled is None:
        return None, []
    return scheduled, scheduler.commit(scheduled, model.run(scheduled))


def run_all(scheduler, model, limit=2000):
    finished, kinds = [], []
    for _ in range(limit):
        scheduled, done = step(scheduler, model)
        scheduler.pool.check()
        if scheduled is None:
            return finished, kinds
        kinds.append(scheduled.batch.kind)
        finished += done
    raise AssertionError(f"{limit} steps and no end")


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def test_one_request_gets_the_models_text():
    scheduler, model = make()
    scheduler.add(one := request("a", prompt_of(1, 11), count=9))
    finished, kinds = run_all(scheduler, model)
    assert finished == [one] and one.output == expected(one.prompt, 9)
    assert one.finish_reason is FinishReason.LENGTH and one.cached_tokens == 0
    assert kinds == [StepKind.PREFILL] + [StepKind.DECODE] * 8


def test_a_stop_token_ends_and_belongs_to_the_output():
    prompt = prompt_of(2, 5)
    third = expected(prompt, 3)[2]
    scheduler, model = make()
    scheduler.add(one := request("a", prompt, count=20, stops=frozenset({third})))
    run_all(scheduler, model)
    assert one.output == expected(prompt, 20, {third}) and one.finish_reason is FinishReason.STOP


def test_a_long_prefill_goes_in_chunks_and_decodes_run_between():
    scheduler, model = make(chunk_tokens=8)
    scheduler.add(short := request("short", prompt_of(3, 6), count=12))
    step(scheduler, model)
    scheduler.add(long := request("long", prompt_of(4, 40), count=2))
    _, kinds = run_all(scheduler, model)
    assert kinds[:10] == [StepKind.DECODE, StepKind.PREFILL] * 5
    assert short.output == expected(short.prompt, 12) and long.output == expected(long.prompt, 2)


def test_several_prompts_share_a_prefill_step_up_to_its_budget():
    scheduler, model = make(chunk_tokens=10)
    for i in range(3):
        scheduler.add(request(str(i), prompt_of(i, 6)))
    first, _ = step(scheduler, model)
    assert [len(part.tokens) for part in first.batch.requests] == [6, 4] and first.samples == (True, False)


def test_a_second_request_finds_the_first_ones_blocks():
    scheduler, model = make()
    prompt = prompt_of(5, 13)
    scheduler.add(request("a", prompt, count=6))
    run_all(scheduler, model)
    scheduler.add(again := request("b", prompt, count=6))
    scheduler.add(longer := request("c", [*prompt, *expected(prompt, 6), 5], count=2))
    first, _ = step(scheduler, model)
    assert again.cached_tokens == 12 and len(first.batch.requests[0].tokens) == 1
    assert longer.cached_tokens == 16  # generated tokens are shared too
    run_all(scheduler, model)
    assert again.output == expected(prompt, 6) and longer.output == expected(longer.prompt, 2)


def test_the_last_prompt_token_is_always_computed():
    scheduler, model = make()
    prompt = prompt_of(6, 8)  # two full blocks
    for name in "ab":
        scheduler.add(last := request(name, prompt, count=1))
        run_all(scheduler, model)
    assert last.cached_tokens == 4 and last.output == expected(prompt, 1)


def test_when_blocks_run_out_the_last_admitted_gives_way_and_loses_no_token():
    scheduler, model = make(num_blocks=8)
    first, second = request("a", prompt_of(7, 12), count=14), request("b", prompt_of(8, 12), count=14)
    scheduler.add(first)
    scheduler.add(second)
    finished, _ = run_all(scheduler, model)
    assert finished == [first, second] and first.num_preemptions == 0 and second.num_preemptions >= 1
    assert first.output == expected(first.prompt, 14) and second.output == expected(second.prompt, 14)
    assert second.cached_tokens == 0  # its own blocks, found again, are no hit


def test_preemptions_per_request_are_bounded():
    scheduler, model = make(num_blocks=10, max_preemptions=1, max_running=6)
    requests = [request(str(i), prompt_of(i, 5), count=20) for i in range(6)]
    for one in requests:
        scheduler.add(one)
    run_all(scheduler, model)
    assert max(one.num_preemptions for one in requests) == 1
    assert all(one.output == expected(one.prompt, 20) for one in requests)


def test_removing_frees_at_once_wherever_the_request_stands():
    scheduler, model = make(max_running=1)
    running, waiting = request("a", prompt_of(1, 9), count=9), request("b", prompt_of(2, 9))
    scheduler.add(running)
    scheduler.add(waiting)
    scheduled = scheduler.schedule()
    tokens = model.run(scheduled)
    scheduler.remove(waiting)
    scheduler.remove(running)  # while its step is on the device
    assert scheduler.commit(scheduled, tokens) == [] and running.output == []
    assert scheduler.pool.num_used == 0 and scheduler.schedule() is None
    scheduler.remove(running)  # once more is nothing
    scheduler.pool.check()


def test_what_can_never_fit_is_known_before():
    scheduler, _ = make(num_blocks=4)
    assert scheduler.can_ever_fit(12, 5) and not scheduler.can_ever_fit(12, 6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(4, 12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14), st.integers(1, 12)), min_size=1, max_size=10),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_every_request_ends_with_the_text_it_would_have_had_alone(num_blocks, asked, chunk_tokens, max_running):
    scheduler, model = make(num_blocks=num_blocks, chunk_tokens=chunk_tokens, max_running=max_running)
    requests = [
        request(str(i), prompt_of(family, length), count=count)
        for i, (family, length, count) in enumerate(asked)
        if scheduler.can_ever_fit(length, count)
    ]
    for one in requests:
        scheduler.add(one)
    finished, _ = run_all(scheduler, model)
    assert sorted(one.id for one in finished) == sorted(one.id for one in requests)
    assert all(one.output == expected(one.prompt, one.sampling.max_new_tokens) for one in requests)
    assert all(one.num_preemptions <= scheduler.config.max_preemptions for one in requests)
    assert scheduler.pool.num_used == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Clients come, go away, and steps run, in any order."""

    def __init__(self):
        super().__init__()
        self.scheduler, self.model = make(num_blocks=9, chunk_tokens=6, max_running=3)
        self.alive = []
        self.count = 0

    @rule(family=st.integers(0, 2), length=st.integers(1, 14), count=st.integers(1, 12))
    def arrive(self, family, length, count):
        self.count += 1
        one = request(str(self.count), prompt_of(family, length), count=count)
        self.scheduler.add(one)
        self.alive.append(one)

    @rule()
    def run_a_step(self):
        scheduled, finished = step(self.scheduler, self.model)
        assert scheduled is not None or not self.alive  # work is never left lying
        self._end(finished)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_client_goes_away(self, data):
        one = data.draw(st.sampled_from(self.alive))
        self.scheduler.remove(one)
        self.alive.remove(one)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_client_goes_away_in_mid_step(self, data):
        scheduled = self.scheduler.schedule()
        assert scheduled is not None
        tokens = self.model.run(scheduled)
        self.a_client_goes_away(data)
        self._end(self.scheduler.commit(scheduled, tokens))

    def _end(self, finished):
        for one in finished:
            self.alive.remove(one)
            assert one.output == expected(one.prompt, one.sampling.max_new_tokens)

    @invariant()
    def blocks_are_where_they_belong(self):
        pool = self.scheduler.pool
        pool.check()
        held = {block for one in self.scheduler.running for block in one.blocks}
        assert pool.num_used == len(held)
        assert sorted(map(id, self.alive)) == sorted(map(id, [*self.scheduler.running, *self.scheduler.waiting]))

    def teardown(self):
        finished, _ = run_all(self.scheduler, self.model)
        self._end(finished)
        assert not self.alive and self.scheduler.pool.num_used == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_scheduler_needs_no_torch():
    code = "import sys, tkcc.engine.serve.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("start, count, want", [(0, 3, (1, 2, 3)), (2, 3, (3, 4, 5)), (4, 2, (5, 6)), (1, 1, (2,))])
def test_tokens_are_prompt_then_output(start, count, want):
    one = request("a", [1, 2, 3])
    one.output += [4, 5, 6]
    assert one.tokens_from(start, count) == want
