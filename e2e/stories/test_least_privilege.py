"""Least privilege, by the API server's audit log of the whole session: nothing was refused, nothing granted in vain,
nothing made twice."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from e2e.stories.stage import Stage
from e2e.stories.telling import Story

OPERATOR = "system:serviceaccount:tkcc-system:"
WORKER_RIGHTS = {("patch", "tkcc.dev/recompilationruns/status"), ("get", "configmaps"), ("patch", "configmaps")}

Right = tuple[str, str]  # verb, GROUP/RESOURCE
# An artifact goes once runs have found more than revisionHistoryLimit others: too long a story; tests/shell has it.
SELDOM = {("delete", "configmaps")}

story: Story["Account"] = Story(act=4)


@dataclass(frozen=True)
class Account:
    """What the operator and the workers did, and what they may do."""

    granted: frozenset[Right]
    by_operator: list[dict[str, Any]]
    by_workers: list[dict[str, Any]]


@story.given
def the_audit_log(stage: Stage) -> Account:
    """Until the chart is uninstalled: its rights go a moment before its pod does."""
    done = [event for event in stage.cluster.plane.audit_events() if event["stage"] == "ResponseComplete"]
    end = min((_at(event) for event in done if _takes_rights(event)), default="9")
    events = [event for event in done if _at(event) < end and "objectRef" in event]
    accounts = [event for event in events if event["user"]["username"].startswith("system:serviceaccount:")]
    by_operator = [event for event in accounts if event["user"]["username"].startswith(OPERATOR)]
    by_workers = [event for event in accounts if _is_worker(event)]
    assert by_operator and by_workers, "nothing was done: this proves nothing"
    return Account(stage.granted, by_operator, by_workers)


@story.chapter
def test_nothing_was_refused(account: Account) -> None:
    refused = [_told(event) for event in (*account.by_operator, *account.by_workers) if _code(event) == 403]
    assert not refused, refused[:10]


@story.chapter
def test_the_operator_used_all_that_it_was_granted(account: Account) -> None:
    done = [event for event in account.by_operator if _code(event) < 300 or _code(event) == 404]
    used = {_right(event) for event in done}
    # An apply that makes the object needs the right to create it, too, and is a patch all the same.
    used |= {("create", _right(event)[1]) for event in done if event["verb"] == "patch" and _code(event) == 201}
    assert sorted(account.granted - used - SELDOM) == []


@story.chapter
def test_workers_used_all_that_they_were_granted_and_touched_only_their_own(account: Account) -> None:
    assert {_right(event) for event in account.by_workers if _code(event) < 300} == WORKER_RIGHTS
    for event in account.by_workers:
        run = event["user"]["username"].rpartition(":")[2]
        assert event["objectRef"]["name"] in (run, f"{run}-result"), _told(event)


@story.chapter
def test_everything_was_made_once(account: Account) -> None:
    """An object may be made again only after it was deleted, and nobody of ours deletes what lives as long as its
    InferenceDeployment."""
    made = Counter(_object(event) for event in account.by_operator if _code(event) == 201 and _is_lasting(event))
    assert made, "nothing was made"
    twice = {name: count for name, count in made.items() if count > 1}
    assert not twice, twice


@story.chapter
def test_creates_were_not_tried_in_vain(account: Account) -> None:
    """A 409 on create is a race or a blind retry; one operator alone has neither, but for an answer that was lost."""
    lost = [_told(e) for e in account.by_operator if e["verb"] == "create" and _code(e) == 409]
    assert len(lost) <= 2, lost


def _is_worker(event: dict[str, Any]) -> bool:
    """A run's own ServiceAccount, in the namespace of a story."""
    namespace, name = event["user"]["username"].split(":")[2:]
    return not namespace.startswith(("kube-", "tkcc-system", "default")) and name != "default"


def _takes_rights(event: dict[str, Any]) -> bool:
    ref = event.get("objectRef", {})
    is_of_chart = ref.get("resource") in ("clusterrolebindings", "rolebindings") and "tkcc" in ref.get("name", "")
    return event["verb"] == "delete" and is_of_chart and event["user"]["username"] == "admin"


def _at(event: dict[str, Any]) -> str:
    """RFC 3339 in UTC with microseconds: text that sorts as time does."""
    at: str = event["requestReceivedTimestamp"]
    return at


def _code(event: dict[str, Any]) -> int:
    return int(event.get("responseStatus", {}).get("code", 0))


def _right(event: dict[str, Any]) -> Right:
    ref = event["objectRef"]
    parts = [ref.get("apiGroup", ""), ref["resource"], ref.get("subresource", "")]
    return event["verb"], "/".join(part for part in parts if part)


def _object(event: dict[str, Any]) -> str:
    ref = event["objectRef"]
    return f"{ref['resource']} {ref['namespace']}/{ref['name']}"


def _is_lasting(event: dict[str, Any]) -> bool:
    ref = event["objectRef"]
    is_named = "name" in ref and not ref.get("subresource")
    return is_named and ref["resource"] not in ("leases",)


def _told(event: dict[str, Any]) -> str:
    return f"{event['user']['username']} {event['verb']} {event['requestURI']}: {_code(event)}"
