"""What a tier measured about one candidate, as the judge saw it: correctness first, then speed per cell."""

from enum import StrEnum

from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER


class Verdict(StrEnum):
    PASS = "Pass"
    FAIL = "Fail"
    INCONCLUSIVE = "Inconclusive"


class Outcome(StrEnum):
    """The named ends of a candidate in a tier. ACCEPTED is the only good one."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"
    REJECTED_STATIC = "REJECTED_STATIC"
    BUILD_FAIL = "BUILD_FAIL"
    WRONG = "WRONG"
    CRASHED = "CRASHED"
    TIMEOUT = "TIMEOUT"
    FUTILE = "FUTILE"  # not faster by the worthwhile margin within its pairs
    REGRESSED = "REGRESSED"  # faster overall but some cell slower than allowed
    QUARANTINED = "QUARANTINED"  # above the measured roofline, or a look that must not be trusted
    EXPIRED = "EXPIRED"  # its incumbent changed, or the budget ended first


@dataclass(frozen=True, config=BORDER)
class AlphaTicket:
    """One share of the campaign's error budget, spent by exactly one decision."""

    id: str
    alpha: float  # chance of a false accept that this decision may use
    min_gain: float  # worthwhile gain as a log-ratio, e.g. 0.005
    max_pairs: int


@dataclass(frozen=True, config=BORDER)
class CellReport:
    """One (phase, batch, context) cell. Times are medians per step over confirmation pairs."""

    phase: str  # "prefill" or "decode"
    batch: int
    new_tokens: int  # per request: 1 in decode
    context_tokens: int  # per request, new tokens included
    weight_ratio: float  # its share of the workload's time under the incumbent
    pairs: int
    incumbent_us: float
    candidate_us: float
    log_gain: float  # ln(incumbent / candidate), median over pairs
    log_gain_low: float  # 95 % interval, pair-block bootstrap
    log_gain_high: float


@dataclass(frozen=True, config=BORDER)
class Correctness:
    """Errors against a reference one precision above, pooled over `positions`; limits are the baseline's errors times
    the allowed factor plus the floor."""

    passed: bool
    positions: int
    logit_error_median: float
    logit_error_p99: float
    logit_error_max: float
    limit_median: float
    limit_p99: float
    limit_max: float
    kv_error_max: float
    kv_limit_max: float
    challenges: tuple[str, ...] = ()  # metamorphic checks that were run
    failure: str = ""  # the first check that failed, with its numbers


@dataclass(frozen=True, config=BORDER)
class Report:
    """One judgement of one candidate in one tier."""

    digest: str
    incumbent_digest: str
    tier: str
    outcome: Outcome
    reason: str  # for people, with numbers
    correctness: Correctness | None = None
    cells: tuple[CellReport, ...] = ()
    pairs: int = 0
    e_value: float = 0.0
    log_gain: float = 0.0  # weighted over cells
    log_gain_low: float = 0.0
    log_gain_high: float = 0.0
    noise_floor: float = 0.0  # smallest log-gain that this tier can tell from its A/A noise
    ticket_id: str = ""
    reload_s: float = 0.0  # candidate source received -> first verified token
    phases_s: dict[str, float] | None = None  # of the reload: build, fork, load, prepare, verify
    environment: dict[str, str] | None = None
