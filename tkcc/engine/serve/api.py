"""The public port: OpenAI's completions and chat completions, models, health and metrics."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from tkcc.engine.serve.accounts import Accounts
from tkcc.engine.serve.answers import SSE_END, Answer, ChatAnswer, CompletionAnswer, sse
from tkcc.engine.serve.chat import ChatTemplate, ChatTemplateError
from tkcc.engine.serve.engine import DrainingError, Engine, QueueFullError, Ticket
from tkcc.engine.serve.errors import ApiError
from tkcc.engine.serve.generation import Piece, generate, usage_of
from tkcc.engine.serve.request import FinishReason, SampledToken, SamplingParams
from tkcc.engine.serve.schema import ChatRequest, CompletionRequest, GenerationRequest, parse_request
from tkcc.engine.serve.tokenizer import Tokenizer

PROBE_HEADER = "x-tkcc-probe"  # set by the operator's correctness probes: served, not counted
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_DEFAULT_TEMPERATURE = 1.0
_LONG_TEXT = 10_000  # characters
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the API, once it is loaded."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    max_context: int
    fingerprint: str


class PublicApi:
    """Routes of the public port. `served` is None while the model loads: everything but metrics answers 503 then."""

    def __init__(self, model_name: str, accounts: Accounts, request_timeout_s: float) -> None:
        self.model_name = model_name
        self.accounts = accounts
        self.served: Served | None = None
        self.is_draining = False
        self._request_timeout_s = request_timeout_s
        self._created = int(time.time())

    def app(self, max_body_bytes: int) -> web.Application:
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_openai_errors])
        app.on_response_prepare.append(self._part_while_draining)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name:.+}", self.model)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def health(self, request: web.Request) -> web.Response:
        if self.served is None or self.is_draining:
            return web.json_response({"status": "loading" if self.served is None else "draining"}, status=503)
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.accounts.metrics.text(), headers={"Content-Type": _METRICS_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._model_card())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived_at_ms = int(time.time() * 1000)
        try:
            served = self._ready()
            body = parse_request(CompletionRequest, await _json(request))
            prompt = body.one_prompt()
            tokens = await _encode(served.tokenizer, prompt, True) if isinstance(prompt, str) else prompt
            max_tokens = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
            ticket = self._submit(served, request, "cmpl", body, tokens, "prompt", max_tokens, body.logprobs)
        except ApiError as err:
            self._count_refusal(request, err, arrived_at_ms)
            raise
        answer = CompletionAnswer(
            ticket.request.id, self.model_name, served.fingerprint, served.tokenizer, body.wants_usage_chunk
        )
        return await self._answer(served, request, body, ticket, answer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived_at_ms = int(time.time() * 1000)
        try:
            served = self._ready()
            body = parse_request(ChatRequest, await _json(request))
            if body.top_logprobs and not body.logprobs:
                raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
            if served.template is None:
                raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
            try:
                text = served.template.render([message.for_template() for message in body.messages])
            except ChatTemplateError as err:
                raise ApiError(400, str(err), param="messages") from err
            tokens = await _encode(served.tokenizer, text, False)  # the template writes special tokens out
            max_tokens = body.max_completion_tokens or body.max_tokens or max(1, served.max_context - len(tokens))
            num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
            ticket = self._submit(served, request, "chatcmpl", body, tokens, "messages", max_tokens, num_logprobs)
        except ApiError as err:
            self._count_refusal(request, err, arrived_at_ms)
            raise
        answer = ChatAnswer(
            ticket.request.id, self.model_name, served.fingerprint, served.tokenizer, body.wants_usage_chunk
        )
        return await self._answer(served, request, body, ticket, answer)

    async def _part_while_draining(self, request: web.Request, response: web.StreamResponse) -> None:
        """Close connections that are kept alive: a client would stay with this server however endpoints change."""
        if self.is_draining:
            response.headers["Connection"] = "close"
            response.force_close()

    def _ready(self) -> Served:
        if self.served is None:
            raise ApiError(503, "the model is loading", code="loading", retry_after_s=1)
        return self.served

    def _submit(
        self,
        served: Served,
        request: web.Request,
        id_prefix: str,
        body: GenerationRequest,
        tokens: list[int],
        prompt_field: str,
        max_tokens: int,
        num_logprobs: int | None,
    ) -> Ticket:
        self._check_model(body.model)
        self._check_size(served, tokens, prompt_field, max_tokens)
        sampling = SamplingParams(
            temperature=_DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            num_logprobs=num_logprobs,
            max_new_tokens=max_tokens,
            stop_token_ids=frozenset() if body.ignore_eos else served.tokenizer.eos_ids,
        )
        try:
            return served.engine.submit(
                f"{id_prefix}-{uuid.uuid4().hex}", tokens, sampling, is_probe=PROBE_HEADER in request.headers
            )
        except QueueFullError as err:
            raise ApiError(429, str(err), code="queue_full", retry_after_s=err.retry_after_s) from err
        except DrainingError as err:
            raise ApiError(503, str(err), code="draining", retry_after_s=1) from err

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; served here: {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _check_size(self, served: Served, tokens: list[int], field: str, max_tokens: int) -> None:
        if not tokens:
            raise ApiError(400, f"{field} is empty", param=field)
        if not 0 <= min(tokens) <= max(tokens) < served.vocab_size:
            raise ApiError(400, f"{field}: token ids must be in [0, {served.vocab_size})", param=field)
        if len(tokens) >= served.max_context:
            raise ApiError(
                400,
                f"{field} has {len(tokens)} tokens; the maximum context is {served.max_context} tokens,"
                " the answer included",
                param=field,
                code="context_length_exceeded",
            )
        if len(tokens) + max_tokens > served.max_context:
            raise ApiError(
                400,
                f"max_tokens={max_tokens} does not fit: {field} has {len(tokens)} tokens, and the maximum context is"
                f" {served.max_context} tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _count_refusal(self, request: web.Request, err: ApiError, arrived_at_ms: int) -> None:
        """Count what this server could not take; a request that is wrong in itself is the client's affair."""
        if err.status in (429, 503) and PROBE_HEADER not in request.headers:
            self.accounts.reject(arrived_at_ms)

    async def _answer(
        self, served: Served, request: web.Request, body: GenerationRequest, ticket: Ticket, answer: Answer
    ) -> web.StreamResponse:
        pieces = generate(served.engine, ticket, served.tokenizer, body.stops, self._request_timeout_s)
        try:
            if body.stream:
                return await _stream(request, pieces, ticket, answer, body.wants_usage_chunk)
            text, tokens, finish = "", list[SampledToken](), FinishReason.STOP
            async for piece in pieces:
                text += piece.text
                tokens += piece.tokens
                finish = piece.finish or finish
            return web.json_response(answer.whole(text, tokens, finish, usage_of(ticket)))
        finally:
            await pieces.aclose()  # a cancelled handler ends the request

    def _model_card(self) -> dict[str, object]:
        card: dict[str, object] = {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tkcc",
        }
        if self.served is not None:
            card["max_model_len"] = self.served.max_context
        return card


async def _stream(
    request: web.Request, pieces: AsyncGenerator[Piece], ticket: Ticket, answer: Answer, with_usage: bool
) -> web.StreamResponse:
    """Server-sent events. An error after the first byte is an event: the status line is gone by then."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    first = await anext(pieces)  # an early failure still gets its status
    await response.prepare(request)
    opening = answer.opening()
    if opening is not None:
        await response.write(sse(opening))
    try:
        piece: Piece | None = first
        while piece is not None:
            await response.write(sse(answer.chunk(piece.text, piece.tokens, piece.finish)))
            piece = await anext(pieces, None)
        if with_usage:
            await response.write(sse(answer.usage_chunk(usage_of(ticket))))
        await response.write(SSE_END)
    except ApiError as err:
        await response.write(sse(err.to_json()))
    await response.write_eof()
    return response


async def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids; a long text is encoded beside the event loop, as it takes milliseconds per 10,000 characters."""
    if len(text) < _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


async def _json(request: web.Request) -> object:
    try:
        return json.loads(await request.text())
    except web.HTTPRequestEntityTooLarge:
        raise
    except (ValueError, LookupError) as err:  # LookupError: an unknown charset
        raise ApiError(400, f"the body is not valid JSON: {err}") from err


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal as OpenAI's error object, those of aiohttp too."""
    try:
        return await handler(request)
    except ApiError as err:
        return err.to_response()
    except web.HTTPRequestEntityTooLarge as err:
        limit = request.client_max_size
        return ApiError(err.status, f"the body is larger than {limit} bytes", code="body_too_large").to_response()
    except web.HTTPException as err:
        return ApiError(err.status, f"{request.method} {request.path}: {err.reason}").to_response()
