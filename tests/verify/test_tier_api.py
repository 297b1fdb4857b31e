"""The tier's HTTP API on a real tier: who may call, and what bad input is told."""

import httpx
import pytest

from tests.verify.tiny import TinyTier, changed, recording, workload
from tkcc.api.candidate import Candidate
from tkcc.api.codec import to_dict
from tkcc.api.report import AlphaTicket, Outcome

pytestmark = pytest.mark.timeout(240)
TICKET = to_dict(AlphaTicket("t", 0.05, 0.005, 2))


def client(tier: TinyTier) -> httpx.Client:
    return tier.tier._client


def url(tier: TinyTier, path: str) -> str:
    return str(client(tier).base_url).rstrip("/") + path


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic x"])
@pytest.mark.parametrize("path", ["/v1/info", "/metrics", "/v1/judgements/j1"])
def test_no_call_without_the_runs_token(tier: TinyTier, path: str, header: str) -> None:
    answer = httpx.get(url(tier, path), headers={"Authorization": header})
    assert answer.status_code == 401 and "token" in answer.json()["error"]


def test_health_needs_no_token(tier: TinyTier) -> None:
    answer = httpx.get(url(tier, "/healthz"))
    assert answer.status_code == 200 and answer.json()["state"] == "READY"


@pytest.mark.parametrize(
    "method, path, body, status, words",
    [
        ("POST", "/v1/candidates", b"{", 400, "not JSON"),
        ("POST", "/v1/candidates", b"[]", 400, "must be a JSON object"),
        ("POST", "/v1/candidates", b'{"source": 3, "params": {}}', 400, "source"),
        ("POST", "/v1/candidates", b'{"source": "", "params": {}, "more": 1}', 400, "more"),
        ("POST", "/v1/judgements", b"{}", 400, "lacks 'stage'"),
        ("POST", "/v1/judgements", b'{"stage": "x"}', 400, "screen, confirm, estimate"),
        ("POST", "/v1/judgements", b'{"stage": "screen", "digest": "d", "ticket": {}}', 400, "alpha"),
        ("GET", "/v1/judgements/j999", b"", 404, "no judgement j999"),
        ("GET", "/v1/judgements/j999?waitS=x", b"", 404, "no judgement"),
        ("PUT", "/v1/workload", b"{}", 400, "lacks 'workload'"),
    ],
)
def test_bad_input_is_told_what_is_wrong(
    tier: TinyTier, method: str, path: str, body: bytes, status: int, words: str
) -> None:
    answer = client(tier).request(method, path, content=body)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_a_candidate_that_nobody_submitted_is_not_judged(tier: TinyTier) -> None:
    body = {"stage": "screen", "digest": "0" * 64, "ticket": TICKET}
    answer = client(tier).post("/v1/judgements", json=body)
    assert answer.status_code == 404 and "POST /v1/candidates first" in answer.json()["error"]


def test_an_empty_recording_is_refused(tier: TinyTier) -> None:
    empty = {**to_dict(recording()), "requests": []}
    answer = client(tier).put("/v1/workload", json={"workload": to_dict(workload()), "recording": empty})
    assert answer.status_code == 400 and "no requests" in answer.json()["error"]


def test_a_workload_comes_with_its_incumbent(tier: TinyTier) -> None:
    """One calibration for both; the baseline revision where none is named."""
    other = changed("    pass  # the one in service")
    body = {"workload": to_dict(workload()), "recording": to_dict(recording())}
    for incumbent in (other, None):
        with_it = body | ({"incumbent": to_dict(incumbent)} if incumbent else {})
        assert client(tier).put("/v1/workload", json=with_it).json()["steps"] > 0
        tier.tier._await_state({"READY"}, 120)
        info = client(tier).get("/v1/info").json()
        assert info["incumbentDigest"] == (incumbent.digest if incumbent else info["baselineDigest"])


def test_a_workload_for_estimates_only_decides_nothing(tier: TinyTier) -> None:
    body = {"workload": to_dict(workload()), "recording": to_dict(recording())}
    assert client(tier).put("/v1/workload", json=body | {"estimatesOnly": True}).status_code == 200
    candidate = changed("    pass  # only sized")
    report = tier.judge(candidate, pairs=2, stage="estimate")
    assert report.pairs == 2 and report.correctness is None
    refused = {"digest": candidate.digest, "stage": "screen", "ticket": TICKET}
    answer = client(tier).post("/v1/judgements", json=refused)
    assert answer.status_code == 409 and "for estimates only" in answer.json()["error"]
    assert client(tier).put("/v1/workload", json=body).status_code == 200
    tier.tier._await_state({"READY"}, 120)


def test_an_estimate_against_the_baseline_needs_no_other_calibration(tier: TinyTier) -> None:
    decode = "    def decode(self, batch, kv):\n        {}\n        return self.inner.decode(batch, kv)"
    slow, same = changed(decode.format("time.sleep(0.01)"), "import time"), changed(decode.format("pass"))
    given = {"workload": to_dict(workload()), "recording": to_dict(recording())}
    client(tier).put("/v1/workload", json=given | {"incumbent": to_dict(slow)}).raise_for_status()
    tier.tier._await_state({"READY"}, 120)
    over_incumbent, over_baseline = (tier.judge(same, stage=stage) for stage in ("estimate", "estimate-baseline"))
    info = client(tier).get("/v1/info").json()
    assert over_incumbent.incumbent_digest == slow.digest == info["incumbentDigest"]
    assert over_baseline.incumbent_digest == info["baselineDigest"]
    assert over_incumbent.log_gain > 0.5 > abs(over_baseline.log_gain)
    client(tier).put("/v1/workload", json=given).raise_for_status()
    tier.tier._await_state({"READY"}, 120)


def test_an_incumbent_that_does_not_build_is_told(tier: TinyTier) -> None:
    body = {"workload": to_dict(workload()), "recording": to_dict(recording())}
    answer = client(tier).put("/v1/workload", json=body | {"incumbent": to_dict(Candidate("def build(:", {}))})
    assert answer.status_code == 422 and "does not build" in answer.json()["error"]
    assert client(tier).put("/v1/workload", json=body).status_code == 200  # it can go on
    tier.tier._await_state({"READY"}, 120)


def test_info_names_what_verdicts_rest_on(tier: TinyTier) -> None:
    info = client(tier).get("/v1/info").json()
    assert len(info["judgeSourceHash"]) == len(info["modelDigest"]) == len(info["baselineDigest"]) == 64
    assert info["confined"] and info["missingFeatures"] == [] and info["noiseFloor"] >= 0.0
    assert sum(cell["weightRatio"] for cell in info["cells"]) == pytest.approx(1.0)


def test_who_asks_for_the_compiler_finds_it_imported(tier: TinyTier) -> None:
    """It takes seconds: not paid for by runners, nor by candidates that do without."""
    body = """
    def prepare(self, kv):  # torch.compile, say
        import sys
        assert ("torch._inductor.compile_fx" in sys.modules) is WANTED
        self.inner.prepare(kv)
"""
    without = body.replace("torch.compile", "nothing").replace("WANTED", "False")
    for source in (without, body.replace("WANTED", "True")):
        report = tier.judge(changed(source), pairs=2)
        assert report.correctness is not None and report.correctness.passed, report.reason


def test_metrics_are_prometheus_text(tier: TinyTier) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    tier.judge(changed("    pass  # for metrics"), pairs=2)
    names = {family.name for family in text_string_to_metric_families(client(tier).get("/metrics").text)}
    assert {"tkcc_tier_candidates", "tkcc_tier_judgements", "tkcc_tier_runners_killed"} <= names


def test_an_estimate_takes_its_pairs_and_needs_no_challenge(tier: TinyTier) -> None:
    report = tier.judge(changed("    pass  # sized"), pairs=14, stage="estimate")
    assert report.pairs == 14 and report.correctness is None
    assert report.log_gain_low <= report.log_gain <= report.log_gain_high


def test_a_report_says_how_it_was_measured(tier: TinyTier) -> None:
    report = tier.judge(changed("    pass  # reported"), pairs=3)
    assert report.outcome is Outcome.FUTILE and report.correctness is not None
    assert report.correctness.positions >= 256 and "weight perturbation" in report.correctness.challenges
    assert set(report.phases_s or {}) == {"build", "fork", "load", "prepare", "verify"}
    assert report.reload_s == pytest.approx(sum((report.phases_s or {}).values()))
    assert {cell.pairs for cell in report.cells} == {report.pairs} and (report.environment or {})["stage"] == "screen"
