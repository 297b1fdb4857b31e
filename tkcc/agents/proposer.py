"""The one protocol that everything which proposes candidates speaks: the offline search, scripts, and LLM agents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tkcc.api.candidate import Candidate
from tkcc.api.report import Report


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the workload, as a tier named it; weight_ratio is its share of the time."""

    phase: str  # "prefill" or "decode"
    batch: int
    new_tokens: int
    context_tokens: int
    weight_ratio: float


@dataclass(frozen=True, slots=True)
class Context:
    """What a proposer may know. Private seeds, challenges and hold-out traffic are not in it."""

    model: Mapping[str, Any]  # ModelConfig's fields
    device: str  # "cpu" or "cuda"
    dtype: str
    threads: int
    cells: tuple[Cell, ...]
    incumbent: Candidate | None = None  # None: the baseline revision


class Proposer(Protocol):
    def propose(self, context: Context) -> Candidate | None:
        """The next candidate to try; None when there is nothing left to propose."""

    def observe(self, report: Report) -> None:
        """A verdict on one of its candidates, from any tier."""
