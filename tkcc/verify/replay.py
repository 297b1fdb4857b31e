"""Recorded requests become the steps that serving them takes: the serving scheduler itself, on a simulated clock.

It decides nothing about speed: the cost of a step is a function that the judge measured. Prompt tokens come from the
recorded block hashes (equal hashes: equal tokens), so prefixes are shared as they were in service; what a request found
in the cache when it was served is there again.
"""

import hashlib
from collections.abc import Callable, Iterator

from tkcc.api.workload import RecordedRequest, Recording
from tkcc.engine.serve.kv_blocks import BlockPool, chained_hashes
from tkcc.engine.serve.request import Request, SampledToken, SamplingParams
from tkcc.engine.serve.scheduler import Scheduler, SchedulerConfig
from tkcc.engine.step import StepBatch

CACHE_BLOCKS = 16_384  # enough that the simulation evicts nothing of a bounded recording


def replay(
    recording: Recording, vocab_size: int, max_positions: int, cost_s: Callable[[StepBatch], float], max_steps: int
) -> Iterator[tuple[StepBatch, float]]:
    """The steps in order, each with its cost; ends after `max_steps`."""
    config = SchedulerConfig(block_tokens=recording.block_tokens)
    longest = -(-max_positions // recording.block_tokens)
    pool = BlockPool(CACHE_BLOCKS + config.max_running * longest)
    scheduler = Scheduler(config, pool)
    tokens = _Tokens(recording.block_tokens, vocab_size)
    coming = sorted(recording.requests, key=lambda r: r.arrival_ms)
    at, now_s = 0, 0.0
    for _ in range(max_steps):
        while at < len(coming) and coming[at].arrival_ms / 1e3 <= now_s:
            request, cached = tokens.request(coming[at], at, max_positions)
            _warm(pool, request, cached, recording.block_tokens)
            scheduler.add(request)
            at += 1
        scheduled = scheduler.schedule()
        if scheduled is None:
            if at == len(coming):
                return
            now_s = coming[at].arrival_ms / 1e3
            continue
        elapsed_s = cost_s(scheduled.batch)
        now_s += elapsed_s
        scheduler.commit(scheduled, [tokens.sampled() if sample else None for sample in scheduled.samples])
        yield scheduled.batch, elapsed_s


def _warm(pool: BlockPool, request: Request, cached_blocks: int, block_tokens: int) -> None:
    """Put what this request found cached in service into the cache, unless an earlier one left it there."""
    hashes = chained_hashes(request.prompt[: cached_blocks * block_tokens], block_tokens)
    shared = pool.match(hashes)
    blocks = pool.allocate(len(hashes) - len(shared), shared)
    if blocks is None:
        return
    for block, key in zip(blocks[len(shared) :], hashes[len(shared) :], strict=True):
        pool.publish(block, key)
    pool.release(blocks)


class _Tokens:
    """Token ids made of names: the same name, the same tokens, in every process."""

    def __init__(self, block_tokens: int, vocab_size: int) -> None:
        self.block_tokens, self.vocab_size = block_tokens, vocab_size
        self.num_sampled = 0

    def request(self, recorded: RecordedRequest, index: int, max_positions: int) -> tuple[Request, int]:
        """The request, and how many of its prompt's blocks were cached when it was served."""
        S = self.block_tokens
        prompt = max(1, min(recorded.prompt_tokens, max_positions - 1))
        output = max(1, min(recorded.output_tokens, max_positions - prompt))
        hashes = recorded.block_hashes
        ids: list[int] = []
        for i in range(-(-prompt // S)):
            ids += self._block(f"block {hashes[i]}" if i < len(hashes) else f"own {index} {i}")
        sampling = SamplingParams(temperature=0.0, max_new_tokens=output)
        return Request(str(index), tuple(ids[:prompt]), sampling), min(recorded.cached_tokens, prompt - 1) // S

    def sampled(self) -> SampledToken:
        self.num_sampled += 1
        return SampledToken(self._block(f"sampled {self.num_sampled}")[0])

    def _block(self, name: str) -> list[int]:
        raw = hashlib.shake_128(name.encode()).digest(4 * self.block_tokens)
        return [int.from_bytes(raw[i : i + 4], "little") % self.vocab_size for i in range(0, len(raw), 4)]
