"""A tier that judges from a table instead of a clock; it remembers what it was asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tkcc.api.candidate import Candidate
from tkcc.api.report import AlphaTicket, Correctness, Outcome, Report

RIGHT = Correctness(True, 256, 0, 0, 0, 1, 1, 1, 0, 1)
WRONG = Correctness(False, 256, 9, 9, 9, 1, 1, 1, 0, 1, failure="logit error median 9 > 1")


@dataclass
class FakeTier:
    """gains: log-gain by candidate source; a missing one is wrong. `overrides` replaces outcomes by (source, stage)."""

    name: str
    gains: Mapping[str, float]
    overrides: Mapping[tuple[str, str], Outcome] = field(default_factory=dict)
    calls: list[tuple[str, str, AlphaTicket]] = field(default_factory=list)

    def judge(
        self, candidate: Candidate, stage: str, ticket: AlphaTicket, progress: Callable[[str, int], None]
    ) -> Report:
        self.calls.append((candidate.source, stage, ticket))
        progress("SPEED", 1)
        gain = self.gains.get(candidate.source)
        if gain is None:
            return Report(
                candidate.digest,
                "base",
                self.name,
                Outcome.WRONG,
                WRONG.failure,
                correctness=WRONG,
                ticket_id=ticket.id,
            )
        outcome = Outcome.ACCEPTED if gain > ticket.min_gain else Outcome.FUTILE
        outcome = self.overrides.get((candidate.source, stage), outcome)
        return Report(
            candidate.digest, "base", self.name, outcome, f"{gain:+.3f}", correctness=RIGHT, pairs=10, log_gain=gain,
            log_gain_low=gain - 0.01, log_gain_high=gain + 0.01, ticket_id=ticket.id, reload_s=0.2,
            phases_s={"build": 0.1, "load": 0.1},
        )  # fmt: skip
