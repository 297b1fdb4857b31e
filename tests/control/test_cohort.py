"""Who is compared with whom, and whether traffic is shared out as the pods are."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tkcc.api.observation import RequestSample
from tkcc.api.report import Verdict
from tkcc.control.cohort import cohorts, crashed
from tkcc.control.observed import Meta, Observed, PodSeen, ProbeSeen, ServingSeen
from tkcc.control.simulation import BASELINE_DIGEST, START

NEW = "a" * 64


def canary_pod(name="c1", **fields):
    return replace(PodSeen(name, True, True, NEW, NEW, BASELINE_DIGEST, requests_started=10), **fields)


def stable_pod(name, **fields):
    pod = PodSeen(name, True, True, "baseline", BASELINE_DIGEST, BASELINE_DIGEST, requests_started=10)
    return replace(pod, **fields)


def seen(canary, stable=(), probes=()):
    def deployment(artifact, pods):
        return ServingSeen(artifact, len(pods), len(pods), len(pods), True, tuple(pods))

    return Observed(
        now=START,
        meta=Meta("demo", "default", "uid", 1),
        canary=deployment(NEW, canary),
        stable=deployment("baseline", stable),
        probes=tuple(probes),
        probe_ids=("p1",),
    )


PROBED = ProbeSeen("c1", START, "p1", tokens_match=True)


@pytest.mark.parametrize(
    "case, fields, probes, loaded, warm, canary",
    [
        ("in service", {}, [], True, True, True),
        ("probed and not let in yet", {"in_service": False}, [PROBED], True, True, False),
        ("not probed", {"in_service": False}, [], True, False, False),
        ("probed too long ago", {"in_service": False}, [replace(PROBED, at=START - timedelta(1))], True, False, False),
        ("not ready, and let in before", {"is_ready": False}, [], False, True, False),
        ("not ready, and new", {"is_ready": False, "in_service": False}, [PROBED], False, False, False),
        ("does not answer, and let in before", {"artifact_digest": ""}, [], False, True, True),
        ("does not answer, and new", {"artifact_digest": "", "in_service": False}, [PROBED], False, False, False),
        ("runs something else", {"artifact_digest": "b" * 64}, [PROBED], False, False, False),
        ("is of an older template", {"template_artifact": "b" * 64}, [PROBED], False, False, False),
        ("goes", {"is_terminating": True}, [PROBED], False, False, False),
        ("was evicted", {"has_ended": True, "is_ready": False, "artifact_digest": ""}, [], False, False, False),
    ],
)
def test_where_a_canary_pod_counts(case, fields, probes, loaded, warm, canary):
    found = cohorts(seen([canary_pod(**fields)], probes=probes), NEW, START)
    assert tuple("c1" in names for names in (found.loaded, found.warm, found.canary)) == (loaded, warm, canary), case


@pytest.mark.parametrize("num_canary, num_stable, size", [(1, 3, 1), (2, 2, 2), (3, 1, 1), (1, 1, 1)])
def test_the_cohort_has_as_many_pods_as_the_canary_where_there_are(num_canary, num_stable, size):
    canary = [canary_pod(f"c{n}") for n in range(num_canary)]
    stable = [stable_pod(f"s{n}") for n in range(num_stable)]
    found = cohorts(seen(canary, stable), NEW, START)
    assert len(found.cohort) == size and set(found.cohort) <= {pod.name for pod in stable}
    assert found.weight_pct == round(100 * num_canary / (num_canary + num_stable))


def test_only_requests_of_the_step_and_of_its_pods_are_compared():
    found = cohorts(seen([canary_pod()], [stable_pod("s1"), stable_pod("s2")]), NEW, START)

    def request(pod, second):
        return RequestSample(pod, "x", START + timedelta(seconds=second), 1, 0, 1, "ok")

    asked = [request(pod, second) for pod in ("c1", "s1", "s2", "gone") for second in (-1, 0, 1)]
    ours, cohort, stable = found.requests_since(asked, START)
    assert [len(part) for part in (ours, cohort, stable)] == [2, 2, 4]
    assert {r.pod for r in cohort} == set(found.cohort)


@pytest.mark.parametrize(
    "case, canary, stable, want",
    [
        ("as the pods are", 25, (25, 25, 25), Verdict.PASS),
        ("a little off is chance", 20, (27, 27, 26), Verdict.PASS),
        ("all to the canary", 100, (0, 0, 0), Verdict.INCONCLUSIVE),
        ("none to the canary", 0, (33, 33, 34), Verdict.INCONCLUSIVE),
        ("too few to say", 1, (2, 2, 2), Verdict.INCONCLUSIVE),
        ("one counter cannot be read", 25, (25, 25, None), Verdict.INCONCLUSIVE),
    ],
)
def test_the_share_of_requests_is_that_of_the_pods(case, canary, stable, want):
    pods = [stable_pod(f"s{n}", requests_started=count) for n, count in enumerate(stable)]
    found = cohorts(seen([canary_pod(requests_started=canary)], pods), NEW, START)
    share, _ = found.share(0, 0)
    assert share.verdict is want, case


def test_what_was_asked_before_the_step_does_not_count():
    pods = [stable_pod(f"s{n}", requests_started=125) for n in range(3)]
    found = cohorts(seen([canary_pod(requests_started=1025)], pods), NEW, START)
    share, started = found.share(1000, 300)
    assert share.verdict is Verdict.PASS and (started.canary, started.cohort) == (25, 75)


def test_a_restart_is_a_crash_of_the_candidate_alone():
    def why(*pods):
        failure = crashed(seen(pods).canary, NEW)
        return failure and (failure.reason, failure.message)

    assert why(canary_pod(restarts=1, waiting_reason="CrashLoopBackOff"))[0] == "CanaryCrashed"
    assert why(canary_pod(restarts=1, last_words="no build"))[1].endswith("1 times: no build")
    assert why(canary_pod(), stable_pod("s1", restarts=5)) is None
    assert why(canary_pod(restarts=1, template_artifact="b" * 64)) is None
