"""One request from tokens to text: pieces as they can be shown, stop strings, deadline, and the end of it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from tkcc.engine.serve.answers import Usage
from tkcc.engine.serve.engine import DrainingError, Engine, StepFailedError, Ticket
from tkcc.engine.serve.errors import ApiError
from tkcc.engine.serve.request import FinishReason, Outcome, SampledToken
from tkcc.engine.serve.tokenizer import StopStrings, TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to show, the tokens that came with it, and in the last piece why generation ended."""

    text: str
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None = None


async def generate(
    engine: Engine, ticket: Ticket, tokenizer: Tokenizer, stops: Sequence[str], timeout_s: float
) -> AsyncGenerator[Piece]:
    """Pieces until the end; the last one has `finish` set. Whatever ends the iteration early ends the request too.

    Raises ApiError when the engine fails or the deadline passes.
    """
    text, stop = TextStream(tokenizer), StopStrings(stops)
    deadline_s = ticket.arrived_s + timeout_s
    try:
        while (token := await _next_token(ticket, deadline_s)) is not None:
            shown = stop.push(text.push(token.token))
            if stop.is_hit:
                engine.end(ticket, Outcome.OK)
                yield Piece(shown, (token,), FinishReason.STOP)
                return
            if shown or token.logprobs is not None:
                yield Piece(shown, (token,))
        tail = stop.push(text.flush())
        finish = FinishReason.STOP if stop.is_hit else ticket.request.finish_reason
        yield Piece(tail + stop.flush(), (), finish or FinishReason.STOP)
    except TimeoutError:
        engine.end(ticket, Outcome.ERROR)
        raise ApiError(504, f"the request took over {timeout_s:g} s", code="timeout") from None
    except StepFailedError as err:
        raise ApiError(500, f"the forward pass failed: {err}", code="engine_error") from err
    except DrainingError as err:
        raise ApiError(503, str(err), code="draining") from err
    finally:
        engine.end(ticket, Outcome.CANCELLED)  # nothing, unless the client went away


async def _next_token(ticket: Ticket, deadline_s: float) -> SampledToken | None:
    async with asyncio.timeout_at(deadline_s):
        return await ticket.next_token()


def usage_of(ticket: Ticket) -> Usage:
    request = ticket.request
    return Usage(len(request.prompt), len(request.output), request.cached_tokens or 0)
