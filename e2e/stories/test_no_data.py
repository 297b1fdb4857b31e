"""No data: where the pods' metrics cannot be read nothing is decided, and the loop goes on when they can be again."""

from collections.abc import Iterator
from contextlib import contextmanager

from e2e.stories.client import Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import Subject, deploy
from e2e.stories.telling import Story
from tkcc.api.condition import ConditionType
from tkcc.api.run import RunOutcome
from tkcc.api.status import Phase

A = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=6.0)
B = Mix(prompt_tokens=(150, 230), shared_tokens=32, per_second=6.0)
ADMIN_PORT = 8001

story: Story[Subject] = Story()


@story.given
def a_deployment_with_a_plan(stage: Stage) -> Subject:
    subject = deploy(stage, "no-data")
    subject.until_ready()
    subject.send(A)
    subject.until("a plan", lambda now: now.drift.plans)
    return subject


@story.chapter
def test_unreachable_metrics_are_told_and_nothing_is_done(subject: Subject) -> None:
    with _admin_ports_cut(subject):
        missing = subject.until_condition(ConditionType.METRICS_AVAILABLE, "False")
        assert missing.reason in ("MetricsMissing", "MetricsStale")
        assert "drift and canary wait" in subject.until_event("MetricsUnavailable")

        subject.send(B)  # a drift that nobody can see
        subject.stays("serving", lambda now: now.phase is Phase.SERVING and not now.drift.drifted, for_s=30)
        assert not subject.runs()
        subject.until_condition(ConditionType.READY, "True")


@story.chapter
def test_what_happens_after_the_gap_is_seen(subject: Subject) -> None:
    subject.until_condition(ConditionType.METRICS_AVAILABLE, "True", "MetricsFound")
    subject.until("a run", lambda _: subject.runs(), 180)
    assert "from the nearest plan" in subject.until_event("TrafficDriftDetected")


@story.chapter
def test_a_run_is_called_off_by_hand(subject: Subject) -> None:
    subject.change({"recompilation": {"mode": "Disabled"}})
    subject.until_phase(Phase.SERVING)
    ((_, _, status),) = subject.runs()
    succeeded = next(c for c in status.conditions if c.type == "Succeeded")
    assert (succeeded.status, succeeded.reason) == ("False", RunOutcome.CANCELLED)
    subject.traffic.stop()
    subject.traffic.assert_all_answered(at_least=100)


@contextmanager
def _admin_ports_cut(subject: Subject) -> Iterator[None]:
    """What is forwarded to the admin ports of its pods is dropped; kubelet's own probes are not forwarded."""
    table = f"cut-{subject.namespace}"
    addresses = ", ".join(pod["status"]["podIP"] for pod in subject.pods("stable"))
    rules = f"""table ip {table} {{
        chain forward {{
            type filter hook forward priority filter; policy accept;
            ip daddr {{ {addresses} }} tcp dport {ADMIN_PORT} drop
        }}
    }}"""
    done = subject.stage.cluster.run(["nft", rules])
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        subject.stage.cluster.run(["nft", "delete", "table", "ip", table])
