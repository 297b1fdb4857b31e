"""What one step runs, on the host: the scheduler makes it, no torch in it."""

from dataclasses import dataclass
from enum import StrEnum


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request's part of a step: `tokens` stand at positions `start`, `start` + 1, ... of its context."""

    tokens: tuple[int, ...]  # new tokens; exactly one in decode
    start: int  # tokens of this request that are in the cache already
    blocks: tuple[int, ...]  # its page table: blocks for at least start + len(tokens) positions

    @property
    def context(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Requests that go through one forward pass together."""

    kind: StepKind
    requests: tuple[StepRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)
