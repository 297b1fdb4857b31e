import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.codec import from_dict
from tkcc.api.spec import Spec
from tkcc.control.steps import attainable, steps_of


def spec(replicas, steps=()):
    return from_dict(
        Spec,
        {"model": {"uri": "pvc://w", "name": "m"}, "replicas": replicas, "rollout": {"steps": list(steps)}},
    )


@pytest.mark.parametrize(
    "case, replicas, steps, pods",
    [
        ("quarters of four", 4, [25, 50, 75], [1, 2, 3]),
        ("a half of two", 2, [50], [1]),
        ("thirds, to the nearest percent", 3, [33, 67], [1, 2]),
        ("an eighth may be called 12 or 13", 8, [12], [1]),
        ("an eighth may be called 12 or 13", 8, [13], [1]),
        ("single percents of a hundred", 100, [1, 5, 99], [1, 5, 99]),
        ("by default one pod, then half", 8, [], [1, 4]),
        ("by default one of two is both", 2, [], [1]),
    ],
)
def test_steps_become_pods(case, replicas, steps, pods):
    assert [step.pods for step in steps_of(spec(replicas, steps))] == pods, case


@pytest.mark.parametrize(
    "case, replicas, steps, words",
    [
        ("less than one pod", 4, [5, 50], ["5 % of 4 replicas is 0.2 pods", "attainable: 25, 50, 75"]),
        ("between two pods", 4, [30], ["1.2 pods", "25, 50, 75"]),
        ("no pod would stay stable", 4, [99], ["3.96 pods", "25, 50, 75"]),
        ("one replica has no canary", 1, [50], ["spec.replicas 1", "2 or more"]),
        ("one replica has no canary by default either", 1, [], ["2 or more"]),
    ],
)
def test_steps_that_cannot_be_made_are_refused_with_those_that_can(case, replicas, steps, words):
    with pytest.raises(ValueError) as err:
        steps_of(spec(replicas, steps))
    assert all(word in str(err.value) for word in words), (case, str(err.value))


def test_a_refusal_names_a_few_of_many():
    with pytest.raises(ValueError) as err:
        steps_of(spec(50, [1]))
    assert len(str(err.value)) < 300


@given(st.integers(2, 200))
def test_every_attainable_weight_is_accepted_alone(replicas):
    for step in attainable(replicas)[:: max(1, replicas // 7)]:
        if 1 <= step.weight_pct <= 99:
            (made,) = steps_of(spec(replicas, [step.weight_pct]))
            assert 1 <= made.pods <= replicas - 1
            assert abs(100 * made.pods / replicas - step.weight_pct) <= 0.5
