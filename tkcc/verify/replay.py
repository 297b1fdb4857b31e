"""Recorded requests become the steps that serving them takes, on a simulated clock.

It decides nothing about speed: the cost of a step is a function that the judge measured. Prompt tokens come from the
recorded block hashes (equal hashes: equal tokens, equal blocks), so page tables share prefixes as they did in service.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tkcc.api.workload import RecordedRequest, Recording
from tkcc.engine.step import StepBatch, StepKind, StepRequest


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The scheduler's settings that shape steps."""

    max_requests: int = 8
    max_step_tokens: int = 512
    max_positions: int = 2048


@dataclass(slots=True)
class _Running:
    tokens: list[int]
    blocks: list[int]
    done: int  # tokens in the cache
    prompt: int
    output: int
    generated: int = 0
    owned: list[int] = field(default_factory=list)  # blocks to free at the end
    hashes: list[int] = field(default_factory=list)


def replay(
    recording: Recording, vocab_size: int, limits: ServingLimits, cost_s: Callable[[StepBatch], float], max_steps: int
) -> Iterator[tuple[StepBatch, float]]:
    """The steps in order, each with its cost; ends after `max_steps`."""
    waiting = deque(sorted(recording.requests, key=lambda r: r.arrival_ms))
    engine = _Engine(recording.block_tokens, vocab_size, limits)
    now_s = 0.0
    for _ in range(max_steps):
        while waiting and waiting[0].arrival_ms / 1000 <= now_s:
            engine.enqueue(waiting.popleft())
        step = engine.schedule()
        if step is None:
            if not waiting:
                return
            now_s = waiting[0].arrival_ms / 1000
            continue
        elapsed_s = cost_s(step)
        now_s += elapsed_s
        engine.commit(step)
        yield step, elapsed_s


class _Engine:
    """First come, first served; prefill before decode; chunks of at most max_step_tokens."""

    def __init__(self, block_tokens: int, vocab_size: int, limits: ServingLimits) -> None:
        self.block_tokens, self.vocab_size, self.limits = block_tokens, vocab_size, limits
        self.queue: deque[RecordedRequest] = deque()
        self.running: list[_Running] = []
        self.blocks_by_hash: dict[int, int] = {}
        self.users: dict[int, int] = {}  # block -> running requests that have it
        self.free: list[int] = []
        self.next_block = 1
        self.in_step: list[_Running] = []
        self.num_made = 0

    def enqueue(self, request: RecordedRequest) -> None:
        self.queue.append(request)

    def schedule(self) -> StepBatch | None:
        while self.queue and len(self.running) < self.limits.max_requests:
            self.running.append(self._admit(self.queue.popleft()))
        prefilling = [r for r in self.running if r.done < r.prompt]
        if prefilling:
            return self._prefill(prefilling)
        if not self.running:
            return None
        self.in_step = list(self.running)
        return StepBatch(StepKind.DECODE, tuple(self._part(r, 1) for r in self.in_step))

    def _prefill(self, prefilling: list[_Running]) -> StepBatch:
        left, parts, self.in_step = self.limits.max_step_tokens, [], []
        for r in prefilling:
            n = min(r.prompt - r.done, left)
            if n == 0:
                break
            parts.append(self._part(r, n))
            self.in_step.append(r)
            left -= n
        return StepBatch(StepKind.PREFILL, tuple(parts))

    def _part(self, r: _Running, n: int) -> StepRequest:
        while len(r.blocks) * self.block_tokens < r.done + n:
            block = self._new_block()
            r.blocks.append(block)
            r.owned.append(block)
        while len(r.tokens) < r.done + n:
            r.tokens.append(self._token(f"out {id(r)} {len(r.tokens)}"))
        return StepRequest(tuple(r.tokens[r.done : r.done + n]), r.done, tuple(r.blocks))

    def commit(self, step: StepBatch) -> None:
        for r, part in zip(self.in_step, step.requests, strict=True):
            r.done = part.context
            if r.done >= r.prompt:
                r.generated += 1
        for r in [r for r in self.running if r.generated >= r.output]:
            self.running.remove(r)
            for block in r.owned:
                heapq.heappush(self.free, block)
            for h in r.hashes:
                self._release(h)

    def _admit(self, request: RecordedRequest) -> _Running:
        S, room = self.block_tokens, self.limits.max_positions
        prompt = max(1, min(request.prompt_tokens, room - 1))
        output = max(1, min(request.output_tokens, room - prompt))
        cached_blocks = min(request.cached_tokens, prompt - 1) // S
        hashes = list(request.block_hashes[:cached_blocks])
        self.num_made += 1
        tokens: list[int] = []
        for i in range(-(-prompt // S)):
            known = i < len(request.block_hashes)
            name = f"block {request.block_hashes[i]}" if known else f"own {self.num_made} {i}"
            tokens += self._block_tokens(name)
        blocks = [self._shared_block(h) for h in hashes]
        own = [self._new_block() for _ in range(cached_blocks - len(hashes))]  # cached, but no hash was recorded
        return _Running(tokens[:prompt], blocks + own, cached_blocks * S, prompt, output, owned=own, hashes=hashes)

    def _shared_block(self, block_hash: int) -> int:
        block = self.blocks_by_hash.get(block_hash)
        if block is None:
            block = self.blocks_by_hash[block_hash] = self._new_block()
        self.users[block_hash] = self.users.get(block_hash, 0) + 1
        return block

    def _release(self, block_hash: int) -> None:
        self.users[block_hash] -= 1
        if not self.users[block_hash]:
            del self.users[block_hash]
            heapq.heappush(self.free, self.blocks_by_hash.pop(block_hash))

    def _new_block(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.next_block += 1
        return self.next_block - 1

    def _block_tokens(self, name: str) -> list[int]:
        """S token ids made of a name: the same name, the same tokens, in every process."""
        raw = hashlib.shake_128(name.encode()).digest(4 * self.block_tokens)
        return [int.from_bytes(raw[4 * i : 4 * i + 4], "little") % self.vocab_size for i in range(self.block_tokens)]

    def _token(self, name: str) -> int:
        return self._block_tokens(name)[0]
