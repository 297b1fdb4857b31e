"""`tkcc simulate`: a story for the operator's core, told without a cluster. Pods, traffic and runs are simulated; every
decision is the real one."""

import argparse
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tkcc.api.codec import from_dict, sha256_hex, to_json
from tkcc.api.fields import parse_duration
from tkcc.api.spec import Spec
from tkcc.cli.command import CommandError

if TYPE_CHECKING:
    from tkcc.control.actions import Action
    from tkcc.control.simulation import Behaviour, Load, RunScript, World

COMMAND = "simulate"
SUMMARY = "play a story for the operator without a cluster: phases, actions, weights, conditions"
DESCRIPTION = """Plays a scenario file against the operator's decisions and prints what they are. Pods, traffic,
artifacts and runs are simulated; time is too, so that hours take seconds.

A scenario is YAML: `spec` (of an InferenceDeployment; `manifest` names a file to take it from first), `load`,
`artifacts` by name, `runs` in order, and `events`, each `at` a time. See examples/scenarios.

examples:
  tkcc simulate examples/scenarios/drift.yaml
  tkcc simulate examples/scenarios/slow-canary.yaml --conditions
"""

_MISSING_YAML = "reading a scenario needs PyYAML: pip install pyyaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, help="a YAML file")
    parser.add_argument("--actions", action="store_true", help="print the actions whenever they change")
    parser.add_argument("--conditions", action="store_true", help="print the conditions whenever one flips")
    parser.add_argument("--status", action="store_true", help="end with the whole status as JSON")


def run(args: argparse.Namespace) -> int:
    scenario = read(args.scenario)
    for line in play(scenario, show_actions=args.actions, show_conditions=args.conditions):
        print(line, flush=True)
    if args.status:
        print(to_json(scenario.world.status))
    return 0


@dataclass
class Scenario:
    world: "World"
    minutes: float
    step: timedelta
    events: list[dict[str, Any]]
    spec: dict[str, Any]  # as in the file: events change it


def read(path: Path) -> Scenario:
    """Raises CommandError that names the file and what is wrong in it."""
    data = _yaml(path)
    try:
        return _scenario(data, path)
    except (ValueError, TypeError, KeyError) as err:
        reason = f"{err} is missing" if isinstance(err, KeyError) else str(err)
        raise CommandError(f"{path}: {reason}") from err


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as err:
        raise CommandError(_MISSING_YAML) from err
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise CommandError(f"cannot read {path}: {err}") from err
    if not isinstance(data, dict):
        raise CommandError(f"{path}: not a mapping")
    return data


def _scenario(data: dict[str, Any], path: Path) -> Scenario:
    from tkcc.control.simulation import Load, World

    _refuse_unknown(data, {"manifest", "spec", "load", "artifacts", "runs", "events", "minutes", "step", "seed"}, "")
    spec = data.get("spec", {})
    if "manifest" in data:
        spec = merged(_yaml(path.parent / data["manifest"])["spec"], spec)
    behaviours = {digest_of(name): _behaviour(name, values) for name, values in data.get("artifacts", {}).items()}
    world = World(
        from_dict(Spec, spec),
        seed=int(data.get("seed", 0)),
        load=_load(Load(), data.get("load", {})),
        behaviours=behaviours,
        scripts=[_script(values) for values in data.get("runs", ())],
    )
    for digest in behaviours.keys() - {script.artifact for script in world.scripts}:
        world.add_artifact(digest)  # there from the start; the others come from their run
    events = sorted(data.get("events", ()), key=lambda event: parse_duration(event["at"]))
    for event in events:
        known = {"at", "load", "spec", "artifacts", "metricsDown", "operatorDownFor", "loseStatus"}
        _refuse_unknown(event, known, f"events at {event['at']}: ")
    step = parse_duration(data.get("step", "10s"))
    if not step:
        raise ValueError("step must be 1s or more")
    return Scenario(world, float(data["minutes"]), step, events, spec)


def play(scenario: Scenario, *, show_actions: bool, show_conditions: bool) -> list[str]:
    """The story, line by line."""
    from tkcc.api.status import Status

    world, events = scenario.world, list(scenario.events)
    start = down_until = world.now
    lines: list[str] = []
    before: tuple[Any, ...] = ("", 0, "", {})
    while world.now < start + timedelta(minutes=scenario.minutes):
        world.advance(scenario.step)
        while events and world.now - start >= parse_duration(events[0]["at"]):
            event = events.pop(0)
            lines.append(f"{_clock(world.now - start)}  -- {_told(event)}")
            _happen(scenario, event)
            down_until = max(down_until, world.now + parse_duration(event.get("operatorDownFor", "0s")))
            if event.get("loseStatus"):
                world.status = Status()
        if world.now < down_until:
            continue
        count = len(world.events)
        actions = world.turn()
        at = _clock(world.now - start)
        for _, emitted in world.events[count:]:
            lines.append(f"{at}  {emitted.type.value:7} {emitted.reason}: {emitted.message}")
        place = (world.status.phase.value, world.weight_pct)
        if place != before[:2]:
            lines.append(f"{at}  {place[0]:12} canary {place[1]:3} %   stable {world.status.stable.name}")
        ensured = "; ".join(_action(action) for action in actions if _is_shown(action))
        if show_actions and ensured != before[2]:
            lines.append(f"{at}    {ensured}")
        told = {c.type: (c.status.value, c.reason, c.message) for c in world.status.conditions}
        if show_conditions:
            flipped = [t for t, now in told.items() if before[3].get(t, ("", "", ""))[:2] != now[:2]]
            lines += [f"{at}    {t}={told[t][0]} {told[t][1]}: {told[t][2]}" for t in flipped]
        before = (*place, ensured, told)
    lines.append(f"{world.sent} requests sent, {world.failed} failed; {len(world.runs)} runs")
    return lines


def _happen(scenario: Scenario, event: dict[str, Any]) -> None:
    world = scenario.world
    world.load = _load(world.load, event.get("load", {}))
    if "spec" in event:
        scenario.spec = merged(scenario.spec, event["spec"])
        try:
            world.change(from_dict(Spec, scenario.spec))
        except ValueError as err:
            raise CommandError(f"events at {event['at']}: {err}") from err
    for name, values in event.get("artifacts", {}).items():
        world.behaviours[digest_of(name)] = _behaviour(name, values)
    world.metrics_down = bool(event.get("metricsDown", world.metrics_down))


def digest_of(name: str) -> str:
    """Scenarios call artifacts by name; the core knows digests alone."""
    return name if name == "baseline" or len(name) == 64 else sha256_hex(name)


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A JSON merge patch; `rollout.artifact` may be a name."""
    out = dict(base)
    for key, value in patch.items():
        is_deep = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if is_deep else value
    for key in ("artifact", "approvedArtifact"):
        if out.get(key):
            out[key] = digest_of(out[key])
    return out


def _load(base: "Load", values: dict[str, Any]) -> "Load":
    return replace(base, **_named(values, {f.name for f in fields(base)}, "load"))


def _behaviour(name: str, values: dict[str, Any] | None) -> "Behaviour":
    from tkcc.control.simulation import Behaviour

    return Behaviour(**_named(values or {}, {f.name for f in fields(Behaviour)}, f"artifacts.{name}"))


def _script(values: dict[str, Any]) -> "RunScript":
    from tkcc.api.run import RunOutcome
    from tkcc.control.simulation import RunScript

    named = _named(values, {f.name for f in fields(RunScript)}, "runs")
    if "after" in named:
        named["after"] = parse_duration(named["after"])
    if "outcome" in named:
        named["outcome"] = RunOutcome(named["outcome"])
    if "artifact" in named:
        named["artifact"] = digest_of(named["artifact"])
    return RunScript(**named)


def _named(values: dict[str, Any], known: set[str], where: str) -> dict[str, Any]:
    """camelCase keys of the file as the snake_case fields they stand for."""
    snake = {"".join(f"_{c.lower()}" if c.isupper() else c for c in key): value for key, value in values.items()}
    _refuse_unknown(snake, known, f"{where}: ")
    return snake


def _refuse_unknown(values: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{where}unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _clock(elapsed: timedelta) -> str:
    minutes, seconds = divmod(int(elapsed.total_seconds()), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def _told(event: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in event.items() if key != "at")


def _is_shown(action: "Action") -> bool:
    from tkcc.control.actions import EmitEvent, EnsureProbed, EnsureService

    return not isinstance(action, EmitEvent | EnsureProbed | EnsureService)


def _action(action: "Action") -> str:
    """One word and its plain arguments: digests short, nested values left out."""
    parts = []
    for field in fields(action):
        value = getattr(action, field.name)
        if isinstance(value, str):
            parts.append(value[:12] if len(value) == 64 else value)
        elif isinstance(value, int):
            parts.append(str(value))
        elif isinstance(value, tuple):
            parts.append("[" + ", ".join(value) + "]")
    return f"{type(action).__name__}({', '.join(parts)})"
