"""OpenAI response bodies: whole answers, stream chunks, usage and logprobs."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tkcc.engine.serve.request import FinishReason, SampledToken
from tkcc.engine.serve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer:
    """One response: makes every JSON body of it. Subclasses differ in how a choice looks."""

    object_name: str
    chunk_name: str

    def __init__(self, request_id: str, model: str, fingerprint: str, tokenizer: Tokenizer, with_usage: bool) -> None:
        self._head = {
            "id": request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,  # the forward pass in service: changes when an artifact is promoted
        }
        self._tokenizer = tokenizer
        self._with_usage = with_usage

    def opening(self) -> dict[str, Any] | None:
        """The chunk before any text, if this kind has one."""
        return None

    def chunk(self, text: str, tokens: Sequence[SampledToken], finish: FinishReason | None) -> dict[str, Any]:
        choice = self.delta(text, tokens)
        return self._body(self.chunk_name, [{"index": 0, **choice, "finish_reason": finish}], None)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._body(self.chunk_name, [], usage)

    def whole(self, text: str, tokens: Sequence[SampledToken], finish: FinishReason, usage: Usage) -> dict[str, Any]:
        choice = self.choice(text, tokens)
        return self._body(self.object_name, [{"index": 0, **choice, "finish_reason": finish}], usage)

    def _body(self, name: str, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        body = {**self._head, "object": name, "choices": choices}
        if usage is not None or self._with_usage:
            body["usage"] = usage and usage.to_json()
        return body

    def delta(self, text: str, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        raise NotImplementedError

    def choice(self, text: str, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    object_name = chunk_name = "text_completion"
    _offset = 0  # characters sent so far

    def delta(self, text: str, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(tokens)}

    choice = delta

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        known = [(token.token, token.logprobs) for token in tokens if token.logprobs is not None]
        if not known:
            return None
        texts = [self._tokenizer.token_text(token) for token, _ in known]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [logprobs.logprob for _, logprobs in known],
            # The chosen token is always among them, as at OpenAI.
            "top_logprobs": [
                {self._tokenizer.token_text(i): value for i, value in (*logprobs.top, (token, logprobs.logprob))}
                for token, logprobs in known
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
        return self._body(self.chunk_name, choices, None)

    def delta(self, text: str, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {"delta": {"content": text} if text or tokens else {}, "logprobs": self._logprobs(tokens)}

    def choice(self, text: str, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        entries = [
            {
                **self._entry(token.token, token.logprobs.logprob),
                "top_logprobs": [self._entry(i, value) for i, value in token.logprobs.top],
            }
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": entries, "refusal": None} if entries else None

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


SSE_END = b"data: [DONE]\n\n"
