"""What clients may ask: the OpenAI request bodies, and the refusal of every field that would not be honoured."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tkcc.engine.serve.errors import ApiError

# Fields that change no token: read and dropped.
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store"}
# Fields that would change the answer but are not implemented: only values that ask for nothing are let through.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
MAX_STOPS = 4


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis: a hint, not honoured


class GenerationRequest(_Strict):
    """What both endpoints share."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None  # not OpenAI's, but common: a replay wants the length it asks for
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def one_prompt(self) -> str | list[int]:
        """The prompt, also when it comes as a list of one. Raises ApiError for several."""
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            if len(self.prompt) > 1:
                raise ApiError(400, "several prompts in one request are not supported: send one each", param="prompt")
            only = self.prompt[0]
            assert not isinstance(only, int)
            return only
        assert isinstance(self.prompt, str) or all(isinstance(x, int) for x in self.prompt)
        return self.prompt  # type: ignore[return-value]  # the element type was just looked at


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates want it: the role that they know, and one text."""
        role = "system" if self.role == "developer" else self.role
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": role, "content": text}


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


R = TypeVar("R", bound=GenerationRequest)


def parse_request(kind: type[R], body: Any) -> R:
    """A request body, checked. Raises ApiError (400) that names the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    asked = {}
    for name, value in body.items():
        if name in _IGNORED or (name in _NEUTRAL and (value is None or value in _NEUTRAL[name])):
            continue
        if name in _NEUTRAL or name not in kind.model_fields:
            raise ApiError(400, f"{name}={_short(value)} is not supported", param=name, code="unsupported_parameter")
        asked[name] = value
    try:
        return kind.model_validate(asked)
    except ValidationError as err:
        raise _refusal(err) from err


def _refusal(err: ValidationError) -> ApiError:
    """The first problem, by the name of the outermost field and where in it."""
    first = err.errors(include_url=False)[0]
    # Unions report one problem per member, with the member's type in the path: only field names and indices are kept.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    name = path[0] if path else "body"
    if first["type"] == "missing":
        return ApiError(400, f"{'.'.join(path)} is missing", param=name)
    expected = "; or ".join(
        dict.fromkeys(e["msg"] for e in err.errors(include_url=False) if e["loc"][:1] == first["loc"][:1])
    )
    return ApiError(400, f"{name}: {expected}, not {_short(first['input'])}", param=name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
