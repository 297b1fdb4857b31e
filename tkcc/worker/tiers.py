"""A tier engine as the worker sees it: HTTP with deadlines, and set up again when the engine was restarted."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tkcc.api.candidate import Candidate
from tkcc.api.codec import from_dict, to_dict
from tkcc.api.report import AlphaTicket, Outcome, Report
from tkcc.api.workload import Recording, Workload

POLL_S = 2.0
START_S = 600.0  # a tier's pod may still pull its image and load weights
CALIBRATION_S = 600.0
CALL_S = 300.0  # a build takes up to 180
JUDGEMENT_S = 1200.0  # a tier ends each after 900
MAX_SETUPS = 3
REJECTED = {
    "REJECTED_STATIC": Outcome.REJECTED_STATIC,
    "BUILD_FAIL": Outcome.BUILD_FAIL,
    "TIMEOUT": Outcome.TIMEOUT,
    "CRASHED": Outcome.CRASHED,
}


# It knows neither workload nor candidate, or what serves them ended and is about to start again.
_STATE_LOST = frozenset({httpx.codes.CONFLICT, httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE})


class TierGoneError(Exception):
    """The tier does not answer, or failed for good. The message says which and why."""


class _LostStateError(Exception):
    """The tier was, or has to be, restarted."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a tier must be told before it can judge."""

    workload: Workload
    recording: Recording
    incumbent: Candidate | None  # None: the baseline revision


class Tier:
    """One tier engine. Every call has a deadline; a restart in between is survived MAX_SETUPS times."""

    def __init__(self, name: str, url: str, token: str, setup: Setup, last_words: Callable[[], str] = str):
        self.name, self.setup = name, setup
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=CALL_S, trust_env=False
        )
        self._last_words = last_words  # "" while it lives, or where that cannot be seen
        self._setups = 0
        self.info: dict[str, Any] = {}

    def close(self) -> None:
        self._client.close()

    def prepare(self) -> None:
        """Wait for it, give it workload and incumbent, wait for its calibration. Raises TierGoneError."""
        if self._setups >= MAX_SETUPS:
            raise TierGoneError(f"the {self.name} tier lost its state {self._setups} times")
        self._setups += 1
        self._await_state({"WAITING", "CALIBRATING", "READY"}, START_S)
        setup = self.setup
        body = {"workload": to_dict(setup.workload), "recording": to_dict(setup.recording)}
        self._call("PUT", "/v1/workload", body | ({"incumbent": to_dict(setup.incumbent)} if setup.incumbent else {}))
        self._await_state({"READY"}, CALIBRATION_S)
        self.info = self._call("GET", "/v1/info")

    def judge(
        self, candidate: Candidate, stage: str, ticket: AlphaTicket, progress: Callable[[str, int], None]
    ) -> Report:
        """Build and judge. Raises TierGoneError."""
        while True:
            try:
                return self._judge(candidate, stage, ticket, progress)
            except _LostStateError:
                self.prepare()

    def _judge(
        self, candidate: Candidate, stage: str, ticket: AlphaTicket, progress: Callable[[str, int], None]
    ) -> Report:
        progress("BUILD", 0)
        # A judge is told neither who proposed a candidate nor why.
        built = self._call("POST", "/v1/candidates", to_dict(Candidate(candidate.source, candidate.params)))
        if built["state"] != "BUILT":
            outcome = REJECTED[built["state"]]
            incumbent = str(self.info.get("incumbentDigest", ""))
            return Report(candidate.digest, incumbent, self.name, outcome, built["reason"], ticket_id=ticket.id)
        body = {"digest": candidate.digest, "stage": stage, "ticket": to_dict(ticket)}
        judgement = self._call("POST", "/v1/judgements", body)["id"]
        deadline = time.monotonic() + JUDGEMENT_S
        while True:
            answer = self._request("GET", f"/v1/judgements/{judgement}?waitS={POLL_S}", None)
            if answer.status_code == httpx.codes.OK:
                return from_dict(Report, answer.json())
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise _LostStateError
            self._check(answer)
            state = answer.json()
            progress(state["state"], state["pairs"])
            if time.monotonic() > deadline:
                raise TierGoneError(f"the {self.name} tier gave no verdict in {JUDGEMENT_S:.0f} s")

    def _await_state(self, wanted: set[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        reason = "it does not answer"
        while time.monotonic() < deadline:
            self._refuse_dead()
            try:
                state = self._client.get("/healthz", timeout=10.0).json()
                if state["state"] in wanted:
                    return
                reason = f"it is {state['state']}"
                if state["state"] == "FAILED":
                    raise TierGoneError(f"the {self.name} tier failed: {state['failure']}")
            except (httpx.HTTPError, ValueError) as err:
                reason = f"it does not answer: {type(err).__name__}"
            time.sleep(0.5)
        raise TierGoneError(f"the {self.name} tier is not ready after {timeout_s:.0f} s: {reason}")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._request(method, path, body)
        self._check(answer)
        found: dict[str, Any] = answer.json()
        return found

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            reason = answer.json()["error"]
        except (ValueError, KeyError):
            reason = f"HTTP {answer.status_code}"
        if answer.status_code in _STATE_LOST and answer.request.method != "PUT":
            raise _LostStateError
        raise TierGoneError(f"the {self.name} tier refused {answer.request.url.path}: {reason}")

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """One call, tried again while the tier is out of reach (all calls may be repeated). Raises TierGoneError."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self._client.request(method, path, json=body)
            except httpx.HTTPError as err:
                self._refuse_dead()
                if time.monotonic() > deadline:
                    raise TierGoneError(f"the {self.name} tier is gone: {type(err).__name__}") from err
                time.sleep(POLL_S)

    def _refuse_dead(self) -> None:
        last_words = self._last_words()
        if last_words:
            raise TierGoneError(f"the {self.name} tier ended: {last_words}")
