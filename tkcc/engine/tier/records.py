"""What the supervisor remembers of candidates and judgements."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tkcc.api.candidate import Candidate
from tkcc.api.report import AlphaTicket, Report


class TierError(Exception):
    """A request that the tier refuses; `status` is the HTTP status that says so."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class Stage(StrEnum):
    SCREEN = "screen"  # correctness, then speed at the ticket's alpha: orders work
    CONFIRM = "confirm"  # fresh runners, fresh seeds; the only stage that accepts
    ESTIMATE = "estimate"  # sizes the gain from fresh pairs, decides nothing
    ESTIMATE_BASELINE = "estimate-baseline"  # the same against the baseline revision, whatever the incumbent is

    @property
    def is_estimate(self) -> bool:
        return self in (Stage.ESTIMATE, Stage.ESTIMATE_BASELINE)


@dataclass(slots=True)
class Build:
    """A candidate's way to a built one. States: BUILT, REJECTED_STATIC, BUILD_FAIL, TIMEOUT, CRASHED."""

    candidate: Candidate
    state: str
    reason: str
    build_s: float
    build_dir: Path


@dataclass(slots=True)
class Judgement:
    id: str
    digest: str
    stage: Stage
    ticket: AlphaTicket
    state: str = "QUEUED"  # then CORRECTNESS, SPEED, DONE: as the judge reports
    pairs: int = 0
    report: Report | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
