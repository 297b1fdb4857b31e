"""Delete, with the operator down: kubectl returns, all owned objects go, and until then clients notice nothing."""

import time

from e2e.stories.client import Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import Subject, deploy
from e2e.stories.telling import Story

A = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=6.0)
DOWN_S = 15.0

story: Story[Subject] = Story(act=2)  # other stories need their operator


@story.given
def a_deployment_with_traffic(stage: Stage) -> Subject:
    subject = deploy(stage, "delete")
    subject.until_ready()
    subject.send(A)
    return subject


@story.chapter
def test_serving_does_not_depend_on_the_operator(subject: Subject) -> None:
    with subject.stage.without_operator():
        since_s = time.time()
        pod = subject.pods("stable")[0]["metadata"]["name"]
        subject.kubectl("delete", "pod", pod, "--wait=false")  # its Deployment needs no operator either
        subject.stage.until("a while", lambda: time.time() > since_s + DOWN_S, 2 * DOWN_S)
        subject.stage.until("two pods are ready", lambda: len(subject.ready_pods()) == 2, 120, subject.explain)
        answered = subject.traffic.answered(since_s=since_s)
        assert len(answered) >= DOWN_S and not [one for one in answered if one.error]

        subject.traffic.stop()
        subject.traffic.assert_all_answered()
        subject.delete()
        subject.until_gone()


@story.chapter
def test_the_operator_comes_back_to_nothing_and_is_well(subject: Subject) -> None:
    before = subject.stage.operator_restarts()
    again = Subject(subject.stage, subject.namespace, "again")
    again.apply({})
    again.until_ready()
    again.delete()
    again.until_gone()
    assert subject.stage.operator_restarts() == before
