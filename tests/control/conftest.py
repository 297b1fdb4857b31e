"""Small worlds: minutes instead of hours, sixty requests a minute, two candidates known by name."""

from datetime import timedelta

import pytest

from tkcc.api.codec import from_dict, sha256_hex
from tkcc.api.run import RunOutcome
from tkcc.api.spec import Spec
from tkcc.api.status import Phase
from tkcc.control.simulation import Behaviour, Load, RunScript, World

FAST, OTHER = sha256_hex("fast"), sha256_hex("other")
HOME = Load(requests_per_minute=60, prompt_tokens=1000)
AWAY = Load(requests_per_minute=60, prompt_tokens=3000)


def merged(base, patch):
    return {
        **base,
        **{
            k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v
            for k, v in patch.items()
        },
    }


SPEC = {
    "model": {"uri": "pvc://weights", "name": "m"},
    "replicas": 4,
    "drift": {
        "tick": "1m",
        "ticks": 2,
        "minRequests": 20,
        "windows": {"long": "8m", "short": "2m"},
        "cacheFill": "1m",
        "cooldown": "20m",
        "maxRunsPerDay": 3,
    },
    "recompilation": {"budget": {"maxDuration": "30m"}},
    "rollout": {
        "steps": [25, 50],
        "analysis": {"interval": "20s", "minRequests": 20},
        "warmupTimeout": "3m",
        "stepDeadline": "8m",
        "progressDeadline": "30m",
    },
}


class Story:
    """A world with the verbs that stories are told in."""

    def __init__(self, patch=None, **world):
        self.data = merged(SPEC, patch or {})
        world.setdefault("load", HOME)
        world.setdefault("behaviours", {FAST: Behaviour(0.7), OTHER: Behaviour(0.75)})
        self.world = World(from_dict(Spec, self.data), **world)
        self.phases = [self.world.status.phase]
        self.weights = [0]

    def __getattr__(self, name):
        return getattr(self.world, name)

    def change(self, patch):
        self.data = merged(self.data, patch)
        self.world.change(from_dict(Spec, self.data))

    def tick(self, dt=timedelta(seconds=20)):
        self.world.advance(dt)
        actions = self.world.turn()
        if self.world.status.phase is not self.phases[-1]:
            self.phases.append(self.world.status.phase)
        if self.world.weight_pct != self.weights[-1]:
            self.weights.append(self.world.weight_pct)
        return actions

    def run(self, minutes, until=None):
        """Turns for so many minutes, or until the claim about this story holds; says whether it did."""
        end = self.world.now + timedelta(minutes=minutes)
        while self.world.now < end:
            self.tick()
            if until is not None and until(self):
                return True
        assert until is None, f"not within {minutes} minutes; phases {self.phases}\n{self.told()}"
        return False

    def until_phase(self, phase, minutes=60):
        self.run(minutes, lambda s: s.status.phase is phase)

    def settle(self, minutes=60):
        """Until a rollout that is under way has ended."""
        self.run(minutes, lambda s: s.status.phase is Phase.SERVING and (s.status.rollout is not None))

    def establish(self):
        """Past the first plan."""
        self.run(15, lambda s: s.status.drift.plans)

    def drift(self, load=AWAY):
        self.world.load = load
        self.run(20, lambda s: s.status.drift.drifted)

    def promoted(self, digest=FAST, load=AWAY):
        """A world where `digest` was found for `load` and promoted."""
        self.world.scripts.append(RunScript(after=timedelta(minutes=2), artifact=digest))
        self.establish()
        self.drift(load)
        self.run(40, lambda s: s.status.stable.artifact == digest and s.status.phase is Phase.SERVING)
        return self

    def condition(self, type_):
        return next(c for c in self.status.conditions if c.type == type_)

    def reasons(self):
        return [event.reason for _, event in self.world.events]

    def told(self):
        lines = [f"{at:%H:%M:%S} {e.type} {e.reason}: {e.message}" for at, e in self.world.events]
        lines += [f"{c.type}={c.status} {c.reason}: {c.message}" for c in self.world.status.conditions]
        return "\n".join(lines)


@pytest.fixture
def story():
    return Story


@pytest.fixture
def names():
    """Digests of the two known candidates."""
    return FAST, OTHER


@pytest.fixture
def no_improvement():
    return RunScript(after=timedelta(minutes=2), outcome=RunOutcome.NO_IMPROVEMENT, message="nothing was faster")
