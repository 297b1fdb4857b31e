"""`tkcc simulate` on the scenarios that ship, and on files that are wrong."""

from pathlib import Path

import pytest

from tkcc.cli.main import main

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"


def played(capsys, name, *options):
    assert main(["simulate", str(SCENARIOS / name), *options]) == 0
    return capsys.readouterr().out


def test_drift_is_answered_by_a_run_and_a_return_without_one(capsys):
    out = played(capsys, "drift.yaml")
    assert out.count("CandidatePromoted") == 3 and out.count("RecompilationStarted") == 2
    assert "it goes through the canary, without a run" in out
    assert out.splitlines()[-1].endswith("0 failed; 2 runs")


def test_a_slow_canary_is_rolled_back(capsys):
    out = played(capsys, "slow-canary.yaml", "--actions", "--conditions")
    assert "LatencyExceeded" in out and "CandidatePromoted" not in out
    assert "EnsureWeight(0, [])" in out and "RolloutHealthy=False" in out


def test_trouble_ends_as_calm_does(capsys):
    out = played(capsys, "trouble.yaml", "--status")
    assert out.count("CandidatePromoted") == 1 and '"phase":"Serving"' in out.splitlines()[-1]


SPEC = "spec: {model: {uri: pvc://w, name: m}}\n"
BAD = [
    ("not YAML", "a: [", "cannot read"),
    ("no mapping", "- 1", "not a mapping"),
    ("no minutes", SPEC, "'minutes' is missing"),
    ("a bad spec", "spec: {replicas: 0}\nminutes: 1", "replicas"),
    ("an unknown word", SPEC + "minutes: 1\nloads: {}", "unknown loads"),
    ("an unknown load", SPEC + "minutes: 1\nload: {tokens: 5}", "load: unknown tokens"),
    ("a bad outcome", SPEC + "minutes: 1\nruns: [{outcome: Fine}]", "Fine"),
    ("a bad time", SPEC + "minutes: 1\nevents: [{at: soon}]", "soon"),
    ("a step of nothing", SPEC + "minutes: 1\nstep: 0s", "step must be"),
    ("a manifest that is not there", "manifest: none.yaml\nminutes: 1", "none.yaml"),
    ("a bad change of spec", SPEC + "minutes: 1\nevents: [{at: 20s, spec: {replicas: 0}}]", "events at 20s"),
]


@pytest.mark.parametrize("case, text, words", BAD, ids=[b[0] for b in BAD])
def test_a_bad_scenario_is_refused_in_one_line(case, text, words, tmp_path, capsys):
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    assert main(["simulate", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err, err


def test_a_missing_file_is_named(capsys):
    assert main(["simulate", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
