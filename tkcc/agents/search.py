"""The offline proposer: a seeded search over rewrite operators that needs no library, no network and no LLM.

First every operator is tried on the best genes so far, the most promising first; then parents are drawn from the best
few, operators by UCB on what they have gained, and pairs of parents are crossed. The same seed and the same verdicts
give the same candidates, which is how an interrupted campaign is resumed.
"""

import math
import random
from dataclasses import dataclass, fields, replace

from tkcc.agents.compose import Genes, canonical, compose
from tkcc.agents.operators import Operator, by_promise
from tkcc.agents.proposer import Context
from tkcc.api.candidate import Candidate
from tkcc.api.report import Outcome, Report

NUM_PARENTS = 4
CROSSOVER_SHARE = 0.25
EXPLORATION = 0.1  # of UCB, in units of log-gain
MAX_REWARD = 0.5
DRAWS_PER_STEP = 20
MAX_DRAWS = 160  # draws that hit known candidates before the space counts as exhausted


@dataclass(slots=True)
class Trial:
    genes: Genes
    operators: tuple[str, ...]  # all that made it, in order
    parent: str | None
    log_gain: float | None = None  # against the incumbent; None: no verdict, or refused


class OfflineProposer:
    """See `tkcc.agents.proposer.Proposer`."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._trials: dict[str, Trial] = {}
        self._rewards: dict[str, list[float]] = {}
        self._untried: list[Operator] | None = None
        self._start = Genes()

    def propose(self, context: Context) -> Candidate | None:
        operators = by_promise(context)
        if self._untried is None:
            self._untried = list(operators)
            self._start = genes_of(context.incumbent)
            digest = compose(self._start, "", (), ()).digest
            self._trials[digest] = Trial(self._start, (), None, log_gain=0.0)
        while self._untried:
            operator = self._untried.pop(0)
            found = self._rewritten(self._parents()[0], operator)
            if found is not None:
                return found
        parents = self._parents()
        for draw in range(MAX_DRAWS):
            if len(parents) > 1 and self._rng.random() < CROSSOVER_SHARE:
                found = self._crossed(*self._rng.sample(parents, 2))
            else:
                # The longer nothing new is near, the further it looks, and the less by what has paid so far.
                further = [self._rng.choice(operators) for _ in range(draw // DRAWS_PER_STEP)]
                found = self._rewritten(self._rng.choice(parents), self._draw_operator(operators), *further)
            if found is not None:
                return found
        return None

    def observe(self, report: Report) -> None:
        trial = self._trials.get(report.digest)
        if trial is None or trial.parent is None:
            return
        was_measured = report.outcome in (Outcome.ACCEPTED, Outcome.FUTILE, Outcome.REGRESSED) and report.pairs > 0
        trial.log_gain = report.log_gain if was_measured else None
        before = self._trials[trial.parent].log_gain or 0.0
        reward = (trial.log_gain - before) if trial.log_gain is not None else -MAX_REWARD
        self._rewards.setdefault(trial.operators[-1], []).append(max(-MAX_REWARD, min(MAX_REWARD, reward)))

    def operator_gains(self) -> dict[str, float]:
        """Mean log-gain that each operator added to its parent."""
        return {name: sum(gains) / len(gains) for name, gains in self._rewards.items()}

    def _parents(self) -> list[str]:
        measured = [(trial.log_gain, digest) for digest, trial in self._trials.items() if trial.log_gain is not None]
        return [digest for _, digest in sorted(measured, reverse=True)[:NUM_PARENTS]]

    def _draw_operator(self, operators: list[Operator]) -> Operator:
        total = sum(len(gains) for gains in self._rewards.values()) + 1

        def upper_bound(operator: Operator) -> float:
            gains = self._rewards.get(operator.name)
            if not gains:
                return math.inf
            return sum(gains) / len(gains) + EXPLORATION * math.sqrt(math.log(total) / len(gains))

        ranked = sorted(operators, key=lambda o: (-upper_bound(o), o.name))
        return ranked[min(int(self._rng.expovariate(1.0)), len(ranked) - 1)]  # mostly the first, never always

    def _rewritten(self, parent: str, *operators: Operator) -> Candidate | None:
        trial = self._trials[parent]
        genes, made_by, reasons = trial.genes, trial.operators, []
        for operator in operators:
            changed = operator.apply(genes)
            if changed is not None:
                genes, made_by = changed, (*made_by, operator.name)
                reasons.append(operator.hypothesis)
        return self._new(genes, "; ".join(reasons), made_by, (parent,)) if reasons else None

    def _crossed(self, first: str, second: str) -> Candidate | None:
        """Each gene from either parent."""
        a, b = self._trials[first], self._trials[second]
        drawn = {f.name: getattr(self._rng.choice((a, b)).genes, f.name) for f in fields(Genes)}
        hypothesis = f"what {first[:8]} and {second[:8]} gained may add up"
        return self._new(canonical(replace(Genes(), **drawn)), hypothesis, (*a.operators, "crossover"), (first, second))

    def _new(
        self, genes: Genes, hypothesis: str, operators: tuple[str, ...], parents: tuple[str, ...]
    ) -> Candidate | None:
        candidate = compose(genes, hypothesis, operators, parents)
        if candidate.digest in self._trials:
            return None
        self._trials[candidate.digest] = Trial(genes, operators, parents[0])
        return candidate


def genes_of(candidate: Candidate | None) -> Genes:
    """The genes that a composed candidate was made of; the baseline's for any other."""
    if candidate is None:
        return Genes()
    known = {f.name for f in fields(Genes)}
    if not set(candidate.params) <= known:
        return Genes()
    genes = replace(Genes(), **candidate.params)  # type: ignore[arg-type]
    return genes if compose(genes, "", (), ()).digest == candidate.digest else Genes()
