"""The live view of a campaign: a table that redraws itself on a terminal, one line a verdict elsewhere."""

import math
import shutil
import sys
import time
from typing import TextIO

from tkcc.worker.campaign import State, Tried

ROWS = 14
REDRAW_S = 0.2


class Table:
    """An observer of a campaign (see tkcc.worker.campaign.Observer)."""

    def __init__(self, budget_s: float, started_at_s: float, out: TextIO = sys.stdout) -> None:
        self._budget_s, self._started_at_s, self._out = budget_s, started_at_s, out
        self._is_live = out.isatty()
        self._drawn = 0  # lines of the last drawing
        self._drawn_at = 0.0
        self._printed: set[tuple[int, str]] = set()

    def changed(self, tried: list[Tried], current: Tried | None, doing: str, pairs: int) -> None:
        if self._is_live:
            self._draw(tried, current, doing, pairs)
        elif current is not None and not doing:
            key = (current.number, list(current.reports)[-1] if current.reports else current.state)
            if key not in self._printed:
                self._printed.add(key)
                print(f"[{self._elapsed()}] {_row(current, key[1])}", file=self._out, flush=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.time() - self._started_at_s), 60)
        return f"{minutes:02d}:{seconds:02d}"

    def _draw(self, tried: list[Tried], current: Tried | None, doing: str, pairs: int) -> None:
        now = time.monotonic()
        if doing and now - self._drawn_at < REDRAW_S:
            return
        self._drawn_at = now
        budget = f"{int(self._budget_s) // 60:02d}:{int(self._budget_s) % 60:02d}"
        lines = [f"{self._elapsed()} of {budget}   {len(tried)} candidates   {_best(tried)}"]
        for one in tried[-ROWS:]:
            state = f"{doing.lower()}, pair {pairs}" if one is current and doing else ""
            lines.append(_row(one, state))
        width = shutil.get_terminal_size().columns
        self._clear()
        self._out.write("".join(line[: width - 1] + "\n" for line in lines))
        self._out.flush()
        self._drawn = len(lines)

    def _clear(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0


def _row(tried: Tried, doing: str) -> str:
    gain = tried.log_gain
    shown = f"x{math.exp(gain):.3f}" if gain is not None else ""
    name = tried.candidate.operators[-1] if tried.candidate.operators else ""
    is_good = tried.state in set(State) - {State.DRAFT}
    reason = "" if is_good else tried.reason
    return (
        f"{tried.number:>3} {tried.candidate.digest[:10]} {name:<16} {shown:>7}  {tried.state:<15} {doing:<24} {reason}"
    )


def _best(tried: list[Tried]) -> str:
    gains = [t.log_gain for t in tried if t.log_gain is not None and t.state in set(State)]
    return f"best x{math.exp(max(gains)):.3f}" if gains else ""
