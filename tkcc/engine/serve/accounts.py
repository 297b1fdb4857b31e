"""Where every request is counted once: metrics, the request log and the recording, from one place.

Hit and query tokens are those of a request's first admission: what a preempted request finds again is no hit.
"""

from tkcc.engine.serve.engine import Ticket
from tkcc.engine.serve.metrics import Metrics
from tkcc.engine.serve.recording import Recorder
from tkcc.engine.serve.request import Outcome
from tkcc.engine.serve.request_log import LoggedRequest, RequestLog


class Accounts:
    def __init__(self, metrics: Metrics, log: RequestLog, recorder: Recorder | None, block_tokens: int) -> None:
        self.metrics, self.log, self.recorder = metrics, log, recorder
        self._block_tokens = block_tokens

    def start(self, ticket: Ticket) -> None:
        if not ticket.request.is_probe:
            self.metrics.started.inc()

    def reject(self, arrived_at_ms: int) -> None:
        """A request that was turned away for lack of room and never started."""
        self.metrics.requests.labels(Outcome.REJECTED.value).inc()
        self.log.append(LoggedRequest(arrived_at_ms, 0, 0, 0, None, None, Outcome.REJECTED.value))

    def end(self, ticket: Ticket, outcome: Outcome) -> None:
        request, metrics = ticket.request, self.metrics
        if request.is_probe:
            return
        num_prompt, num_output, cached = len(request.prompt), len(request.output), request.cached_tokens or 0
        metrics.requests.labels(outcome.value).inc()
        metrics.generation_tokens.inc(num_output)
        metrics.preemptions.inc(request.num_preemptions)
        if request.cached_tokens is not None:
            metrics.query_tokens.inc(num_prompt)
            metrics.hit_tokens.inc(cached)
        if num_output:  # its prefill is done
            metrics.prompt_tokens.inc(num_prompt)
        if ticket.ttft_s is not None:
            metrics.ttft.observe(ticket.ttft_s)
        if ticket.tpot_s is not None:
            metrics.tpot.observe(ticket.tpot_s)
        if outcome is Outcome.OK:
            metrics.prompt_length.observe(num_prompt)
            metrics.generation_length.observe(num_output)
        self.log.append(
            LoggedRequest(
                ticket.arrived_at_ms, num_prompt, cached, num_output, ticket.ttft_s, ticket.tpot_s, outcome.value
            )
        )
        if self.recorder is not None and num_output:
            hashes = request.block_hashes[: num_prompt // self._block_tokens]
            self.recorder.append(ticket.arrived_at_ms, num_prompt, num_output, cached, hashes)
