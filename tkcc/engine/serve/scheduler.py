"""Which requests go into the next step, and what a step's tokens change. No torch, no clock, no I/O.

Policy: first come, first served. A request is admitted when blocks for all its tokens so far are there; prefills go in
chunks of a fixed token budget and take turns with decode steps, so that neither starves. When a decode finds no block,
the request admitted last is preempted and computed anew later. After `max_preemptions` of those a request is admitted
only with all the blocks that it can ever need, and so is never preempted again: every request ends.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tkcc.engine.serve.kv_blocks import BlockPool, chained_hashes
from tkcc.engine.serve.request import FinishReason, Request, SampledToken
from tkcc.engine.step import StepBatch, StepKind, StepRequest


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    block_tokens: int = 16
    max_running: int = 16  # requests in one decode step
    chunk_tokens: int = 512  # new tokens in one prefill step, over all its requests
    max_preemptions: int = 2  # per request


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step to run. `samples[i]` says whether requests[i] gets a token from it (a prefill's chunk may not)."""

    batch: StepBatch
    requests: tuple[Request, ...]
    samples: tuple[bool, ...]


class Scheduler:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self._last_kind = StepKind.DECODE

    def can_ever_fit(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether a request of this size fits into the pool when it runs alone."""
        return self._blocks_for(prompt_tokens + max_new_tokens - 1) <= self.pool.num_blocks

    def add(self, request: Request) -> None:
        assert request.prompt and self.can_ever_fit(len(request.prompt), request.sampling.max_new_tokens)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request wherever it stands, and free its blocks; none of its tokens of a running step will count."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> ScheduledStep | None:
        """The next step, its KV blocks reserved; None when there is nothing to do."""
        self._admit()
        prefills = [r for r in self.running if not r.is_decoding]
        decodes = [r for r in self.running if r.is_decoding]
        if prefills and not (decodes and self._last_kind is StepKind.PREFILL):
            return self._prefill_step(prefills)
        return self._decode_step(decodes) if decodes else None

    def commit(self, step: ScheduledStep, sampled: Sequence[SampledToken | None]) -> list[Request]:
        """Take a step's tokens over (one per request where samples[i]); returns the requests that they finished."""
        finished = []
        for request, part, token in zip(step.requests, step.batch.requests, sampled, strict=True):
            if request not in self.running:  # removed while the step ran
                continue
            request.num_computed = part.context
            self._publish(request)
            if token is None:
                continue
            request.output.append(token.token)
            if token.token in request.sampling.stop_token_ids:
                request.finish_reason = FinishReason.STOP
            elif len(request.output) >= request.sampling.max_new_tokens:
                request.finish_reason = FinishReason.LENGTH
            if request.finish_reason is not None:
                self.remove(request)
                finished.append(request)
        return finished

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            S = self.config.block_tokens
            self._extend_hashes(request)
            # The last token is always computed: its logits are what the step is for.
            shared = self.pool.match(request.block_hashes[: (request.num_tokens - 1) // S])
            is_exempt = request.num_preemptions >= self.config.max_preemptions
            num_blocks = self._blocks_for(request.max_tokens if is_exempt else request.num_tokens)
            blocks = self.pool.allocate(num_blocks - len(shared), shared)
            if blocks is None:
                return
            self.waiting.popleft()
            request.blocks = blocks
            request.num_published = len(shared)
            request.num_computed = len(shared) * S
            if request.cached_tokens is None:  # a preempted request finds its own blocks: that is no hit
                request.cached_tokens = request.num_computed
            self.running.append(request)

    def _prefill_step(self, prefills: Iterable[Request]) -> ScheduledStep:
        budget = self.config.chunk_tokens
        requests, parts, samples = [], [], []
        for request in prefills:
            count = min(budget, request.num_tokens - request.num_computed)
            if count == 0:
                break
            budget -= count
            requests.append(request)
            parts.append(self._part(request, count))
            samples.append(parts[-1].context == request.num_tokens)
        return self._step(StepKind.PREFILL, requests, parts, samples)

    def _decode_step(self, decodes: Iterable[Request]) -> ScheduledStep | None:
        for request in decodes:
            if request in self.running and not self._grow(request):
                self._preempt(request)
        requests = [r for r in self.running if r.is_decoding]
        if not requests:
            return self.schedule()  # all were preempted: what is left is a prefill, or nothing
        parts = [self._part(request, 1) for request in requests]
        return self._step(StepKind.DECODE, requests, parts, [True] * len(requests))

    def _step(
        self, kind: StepKind, requests: list[Request], parts: list[StepRequest], samples: list[bool]
    ) -> ScheduledStep:
        self._last_kind = kind
        return ScheduledStep(StepBatch(kind, tuple(parts)), tuple(requests), tuple(samples))

    def _part(self, request: Request, count: int) -> StepRequest:
        start = request.num_computed
        num_blocks = self._blocks_for(start + count)
        return StepRequest(request.tokens_from(start, count), start, tuple(request.blocks[:num_blocks]))

    def _grow(self, request: Request) -> bool:
        """Make room for the request's next token, at the cost of requests admitted later if it must be."""
        while len(request.blocks) < self._blocks_for(request.num_tokens):
            new = self.pool.allocate(1)
            if new is not None:
                request.blocks += new
                continue
            victim = self._last_preemptible()
            if victim is None or victim is request:
                return False
            self._preempt(victim)
        return True

    def _last_preemptible(self) -> Request | None:
        for request in reversed(self.running):
            if request.num_preemptions < self.config.max_preemptions:
                return request
        return None

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _publish(self, request: Request) -> None:
        """Let others share the request's blocks that became full."""
        num_full = request.num_computed // self.config.block_tokens
        if num_full <= request.num_published:
            return
        self._extend_hashes(request)
        for i in range(request.num_published, num_full):
            self.pool.publish(request.blocks[i], request.block_hashes[i])
        request.num_published = num_full

    def _extend_hashes(self, request: Request) -> None:
        S, known = self.config.block_tokens, request.block_hashes
        num_new = request.num_tokens // S - len(known)
        if num_new:
            tokens = request.tokens_from(len(known) * S, num_new * S)
            known += chained_hashes(tokens, S, known[-1] if known else b"")

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = request.num_published = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_tokens)
