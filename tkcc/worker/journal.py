"""What a campaign has learnt so far, one JSON line a fact, append-only: a restarted worker replays it and goes on.

The campaign is a deterministic function of its proposer's seed and of the verdicts, so replaying means running it again
with the verdicts of the journal in place of measurements.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tkcc.api.codec import canonical_json, from_dict, to_dict
from tkcc.api.report import Report

MAX_BYTES = 700_000  # of a ConfigMap's 1 MiB; the rest is for the artifact


@dataclass(slots=True)
class Journal:
    """`append_line` makes a line durable before it counts; `lines` are those of an earlier life."""

    append_line: Callable[[str], None]
    verdicts: dict[tuple[str, str, str], Report] = field(default_factory=dict)  # by (tier, stage, digest)
    shares: list[tuple[str, float]] = field(default_factory=list)
    started_at_s: float = -1.0  # unix; negative: not begun
    num_bytes: int = 0
    num_replayed: int = 0

    @classmethod
    def open(
        cls, lines: Iterable[str], append_line: Callable[[str], None], identity: dict[str, Any], now_s: float
    ) -> "Journal":
        """Continue a journal of the same campaign, or begin one that started at now_s (unix). Raises ValueError for
        another campaign's."""
        journal = cls(append_line)
        for line in lines:
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut in the middle by a kill: that fact was not yet one
            journal._take(entry, identity)
            journal.num_bytes += len(line) + 1
        if journal.started_at_s < 0.0:
            journal.started_at_s = now_s
            journal._append({"kind": "start", "at": journal.started_at_s, "campaign": identity})
        return journal

    def _take(self, entry: dict[str, Any], identity: dict[str, Any]) -> None:
        match entry.get("kind"):
            case "start":
                if entry["campaign"] != identity:
                    keys = [key for key in identity if entry["campaign"].get(key) != identity[key]]
                    raise ValueError(f"the journal is of another campaign: {', '.join(keys)} differ")
                self.started_at_s = float(entry["at"])
            case "share":
                self.shares.append((entry["name"], entry["alpha"]))
            case "verdict":
                report = from_dict(Report, entry["report"])
                self.verdicts[(report.tier, entry["stage"], report.digest)] = report
                self.num_replayed += 1

    def share(self, name: str, alpha: float) -> None:
        if (name, alpha) not in self.shares:
            self.shares.append((name, alpha))
            self._append({"kind": "share", "name": name, "alpha": alpha})

    def verdict(self, stage: str, report: Report) -> None:
        self.verdicts[(report.tier, stage, report.digest)] = report
        # Screens are many: their cells are not needed to go on.
        kept = replace(report, cells=(), environment=None) if stage == "screen" else report
        self._append({"kind": "verdict", "stage": stage, "report": to_dict(kept)})

    @property
    def is_full(self) -> bool:
        return self.num_bytes > MAX_BYTES

    def _append(self, entry: dict[str, Any]) -> None:
        line = canonical_json(entry)
        self.append_line(line)
        self.num_bytes += len(line) + 1
