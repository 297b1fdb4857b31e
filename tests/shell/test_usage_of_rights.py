"""What the chart grants against what the operator did in all tests before this one, from the API server's audit log."""

from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from tests.conftest import SYSTEM, rendered_chart

pytestmark = pytest.mark.shell

USER = f"system:serviceaccount:{SYSTEM}:tkcc"
NEEDED = {"test_turns.py", "test_runs.py", "test_record.py", "test_process.py"}

Right = tuple[str, str, str]  # API group, resource (with subresource), verb


def granted() -> set[Right]:
    rights: set[Right] = set()
    for obj in yaml.safe_load_all(rendered_chart("rbac")):
        for rule in (obj or {}).get("rules", []):
            for group in rule["apiGroups"]:
                rights |= {(group, resource, verb) for resource in rule["resources"] for verb in rule["verbs"]}
    return rights


def used(events: Iterable[dict[str, Any]]) -> set[Right]:
    rights: set[Right] = set()
    for event in events:
        ref = event["objectRef"]
        resource = f"{ref['resource']}/{ref['subresource']}" if "subresource" in ref else ref["resource"]
        rights.add((ref.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == 201:
            rights.add((ref.get("apiGroup", ""), resource, "create"))  # an apply that makes an object needs both
    return rights


def test_nothing_was_refused_and_no_right_is_idle(plane, request: pytest.FixtureRequest):
    ran = {item.path.name for item in request.session.items}
    if not ran >= NEEDED:
        pytest.skip(f"needs the whole suite: {', '.join(sorted(NEEDED - ran))} did not run")
    events = [e for e in plane.audit_events() if e["user"]["username"] == USER and "resource" in e.get("objectRef", {})]
    assert len(events) > 500
    refused = [e for e in events if e["responseStatus"]["code"] == 403 and not _is_starting(e)]
    assert [(e["verb"], e["requestURI"], e["responseStatus"].get("message")) for e in refused] == []
    assert granted() - used(events) == set(), "granted and never used"


def _is_starting(event: dict[str, Any]) -> bool:
    """An API server that has just been started refuses everybody until it has read the roles."""
    reason = event.get("annotations", {}).get("authorization.k8s.io/reason", "")
    return "not found" in reason or reason == ""
