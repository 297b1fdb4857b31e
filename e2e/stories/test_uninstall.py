"""`helm uninstall` leaves nothing stuck: what serves goes on serving, and goes when it is deleted."""

import time

from e2e.demo.setting import SYSTEM_NAMESPACE
from e2e.stories.client import Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import Subject, deploy
from e2e.stories.telling import Story

A = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=6.0)

story: Story[Subject] = Story(act=3)


@story.given
def a_deployment_with_traffic(stage: Stage) -> Subject:
    subject = deploy(stage, "uninstall")
    subject.until_ready()
    subject.send(A)
    return subject


@story.chapter
def test_the_chart_goes_and_serving_goes_on(subject: Subject) -> None:
    subject.stage.ground.helm("uninstall", "tkcc", "--namespace", SYSTEM_NAMESPACE, "--wait", "--timeout", "60s")
    since_s = time.time()
    subject.stage.until("answers", lambda: len(subject.traffic.answered(since_s=since_s)) >= 30, 60)
    subject.traffic.stop()
    subject.traffic.assert_all_answered()
    subject.stage.ground.kubectl("delete", "namespace", SYSTEM_NAMESPACE, "--timeout=60s")


@story.chapter
def test_what_served_is_deleted_without_the_operator(subject: Subject) -> None:
    subject.delete()
    subject.until_gone()


@story.chapter
def test_namespaces_and_crds_go_too(subject: Subject) -> None:
    """Whatever other stories left in them."""
    kubectl = subject.stage.ground.kubectl
    kubectl("delete", "infdep", "--all", "--all-namespaces", "--timeout=60s")
    kubectl("delete", "namespace", subject.namespace, "--timeout=100s")
    crds = kubectl("get", "crd", "-o", "name").split()
    assert sorted(crds) == [f"customresourcedefinition.apiextensions.k8s.io/{name}.tkcc.dev" for name in CRDS]
    kubectl("delete", *crds, "--timeout=60s")


CRDS = ("inferencedeployments", "recompilationruns")
