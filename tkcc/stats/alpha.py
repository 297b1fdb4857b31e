"""The error budget of a campaign: at most `total` for any false accept, however many candidates are tried.

Each decision that can accept draws one share, named by what is decided; the shares sum to at most `total`, so by the
union bound does the chance of any false accept. Screens that only order work need no share.
"""

import math
from collections.abc import Iterable


class BudgetSpent(Exception):
    """The campaign has made as many decisions as it may."""


class AlphaLedger:
    """Shares of one campaign. With `max_decisions` all are equal (total / max_decisions) and the next one raises
    BudgetSpent; without, the k-th is total * 6 / (pi^2 k^2), which never ends and soon gets hard to win.

    Drawing again under the same name gives the same share: a decision that is resumed is still one decision.
    """

    def __init__(self, total: float = 0.05, max_decisions: int | None = None) -> None:
        if not 0.0 < total < 1.0:
            raise ValueError(f"total must lie between 0 and 1, got {total}")
        if max_decisions is not None and max_decisions < 1:
            raise ValueError(f"max_decisions must be 1 or more, got {max_decisions}")
        self.total = total
        self.max_decisions = max_decisions
        self._shares: dict[str, float] = {}

    @classmethod
    def replay(cls, shares: Iterable[tuple[str, float]], total: float, max_decisions: int | None) -> "AlphaLedger":
        """The ledger as it was, from the (name, share) pairs of a journal. Raises ValueError if they overdraw it."""
        ledger = cls(total, max_decisions)
        for name, share in shares:
            if ledger._shares.setdefault(name, share) != share:
                raise ValueError(f"{name} has drawn two different shares: {ledger._shares[name]} and {share}")
        if not ledger.spent <= total * (1.0 + 1e-9):
            raise ValueError(f"the journal's shares sum to {ledger.spent}, more than {total}")
        return ledger

    def draw(self, name: str) -> float:
        """The share of the decision `name`, new or as drawn before. Raises BudgetSpent when no decision is left."""
        known = self._shares.get(name)
        if known is not None:
            return known
        k = len(self._shares) + 1
        if self.max_decisions is not None:
            if k > self.max_decisions:
                raise BudgetSpent(f"all {self.max_decisions} decisions of this campaign are made")
            share = self.total / self.max_decisions
        else:
            share = self.total * 6.0 / (math.pi * k) ** 2
        self._shares[name] = share
        return share

    @property
    def spent(self) -> float:
        """Sum of the shares drawn; never more than `total`."""
        return math.fsum(self._shares.values())

    @property
    def shares(self) -> tuple[tuple[str, float], ...]:
        """(name, share) in the order they were drawn: what a journal keeps and `replay` reads."""
        return tuple(self._shares.items())
