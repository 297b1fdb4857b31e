"""A request inside the engine: what was asked, how far it is, and how it ended. No torch, no text."""

import random
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended, as metrics and the request log count it."""

    OK = "ok"
    CANCELLED = "cancelled"  # the client went away
    ERROR = "error"  # the engine's fault, deadlines included
    REJECTED = "rejected"  # never started: queue full, loading or draining


class FinishReason(StrEnum):
    """Why generation stopped, in OpenAI's words."""

    STOP = "stop"  # end-of-sequence token or stop string
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    seed: int | None = None  # None: from the system's entropy
    num_logprobs: int | None = None  # None: none; k: the chosen token's and those of the k likeliest
    max_new_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one position under the model's own distribution (temperature 1, no top_p)."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the scheduler between `add` and its end; everybody else only reads."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    rng: random.Random = field(default_factory=random.Random)
    output: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # chained, one per full block of prompt + output so far
    num_published: int = 0  # leading blocks that the prefix cache knows
    cached_tokens: int | None = (
        None  # prompt tokens found in the prefix cache at first admission; None: not admitted yet
    )
    num_preemptions: int = 0
    is_probe: bool = False  # the operator's own correctness probe: in no count, log or recording
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_tokens(self) -> int:
        """Most tokens whose keys and values this request can ever need: the last sampled one is never computed."""
        return len(self.prompt) + self.sampling.max_new_tokens - 1

    @property
    def is_decoding(self) -> bool:
        return bool(self.output) and self.num_computed == self.num_tokens - 1

    def tokens_from(self, start: int, count: int) -> tuple[int, ...]:
        """Tokens at positions [start, start + count) of prompt + output."""
        split = len(self.prompt)
        if start >= split:
            return tuple(self.output[start - split : start - split + count])
        return self.prompt[start : start + count] + tuple(self.output[: max(0, start + count - split)])
