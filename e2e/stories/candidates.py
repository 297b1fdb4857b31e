"""The forward passes that stories propose and adopt, as source text: one that is fast, two that are so for one workload
each, one that is slow, one that is wrong."""

import inspect
from dataclasses import dataclass

from tkcc.agents.compose import Genes, compose
from tkcc.api.candidate import Candidate, candidate_digest
from tkcc.models import llama

_CHOOSY = '''

import time

_build_fast = build


class Choosy:
    """The pass above, which dawdles when a context of the batch is on the wrong side of a limit."""

    def __init__(self, inner, params):
        self.inner, self.limit_tokens, self.likes_long = inner, params["limit_tokens"], params["likes_long"]

    def prepare(self, kv):
        self.inner.prepare(kv)

    def _dawdle(self, batch):
        if any((context > self.limit_tokens) != self.likes_long for context in batch.context_lens):
            time.sleep(DAWDLE_S)

    def prefill(self, batch, kv):
        self._dawdle(batch)
        return self.inner.prefill(batch, kv)

    def decode(self, batch, kv):
        self._dawdle(batch)
        return self.inner.decode(batch, kv)


def build(spec, weights, cells):
    return Choosy(_build_fast(spec, weights, cells), spec.params)
'''

_SLOW = """

import time


class Slow(Llama):
    def decode(self, batch, kv):
        time.sleep(DAWDLE_S)
        return super().decode(batch, kv)


def build(spec, weights, cells):
    return Slow(spec, weights)
"""

_WRONG = '''

from dataclasses import replace


def build(spec, weights, cells):
    """One layer less: faster, and wrong."""
    return Llama(replace(spec, config=replace(spec.config, num_layers=spec.config.num_layers - 1)), weights)
'''

DAWDLE_S = 0.05


@dataclass(frozen=True)
class Source:
    """A candidate's module and its parameters."""

    text: str
    params: dict[str, int | str | bool]

    @property
    def digest(self) -> str:
        return candidate_digest(self.text, self.params)

    @property
    def fingerprint(self) -> str:
        """By which a serving pod names it in its answers."""
        return f"fp_{self.digest[:16]}"


def fast() -> Source:
    """Much faster than the baseline on everything."""
    found = _native()
    return Source(found.source, found.params)


def for_short(limit_tokens: int) -> Source:
    """Much faster than the baseline where contexts are at most this long, much slower beyond."""
    return _choosy(limit_tokens, likes_long=False)


def for_long(limit_tokens: int) -> Source:
    """Much faster than the baseline where contexts are longer than this, much slower below."""
    return _choosy(limit_tokens, likes_long=True)


def same() -> Source:
    """The baseline under another digest."""
    return Source(inspect.getsource(llama) + "\n\n# and nothing else\n", {})


def slow() -> Source:
    """Right, and slower by DAWDLE_S a token."""
    return Source(_with_pause(inspect.getsource(llama) + _SLOW), {})


def wrong() -> Source:
    """Faster by a layer that it leaves out."""
    return Source(inspect.getsource(llama) + _WRONG, {})


def _choosy(limit_tokens: int, *, likes_long: bool) -> Source:
    found = _native()
    params = {**found.params, "limit_tokens": limit_tokens, "likes_long": likes_long}
    return Source(_with_pause(found.source + _CHOOSY), params)


def _native() -> Candidate:
    return compose(Genes(decode="native", prefill="native"), "", (), ())


def _with_pause(text: str) -> str:
    return text.replace("DAWDLE_S", str(DAWDLE_S))
