"""Clients of one deployment: sends completions at a steady rate and writes down what came of each.

Run as a file in the cluster's network. Each line on stdin is a Mix in JSON, in force until the next one; the process
leaves when stdin ends and what is in flight is answered. Every request has a connection of its own, so that each finds
its pod anew. One line per finished request goes to --out.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import httpx

VOCABULARY = (3, 500)  # token ids of any model of the stories, special ones left out
REQUEST_DEADLINE_S = 60.0
MAX_IN_FLIGHT = 64


@dataclass(frozen=True)
class Mix:
    """What requests look like. The first `shared_tokens` of each prompt are the same in all requests of a mix."""

    prompt_tokens: tuple[int, int]  # uniform, both ends included
    shared_tokens: int = 0
    output_tokens: int = 8
    per_second: float = 8.0

    def prompt(self, rng: random.Random) -> list[int]:
        length = rng.randint(*self.prompt_tokens)
        shared = random.Random(self.shared_tokens)
        head = [shared.randint(*VOCABULARY) for _ in range(min(self.shared_tokens, length - 1))]
        return head + [rng.randint(*VOCABULARY) for _ in range(length - len(head))]


@dataclass(frozen=True)
class Answered:
    """One request as its client saw it. `error` is empty where tokens came; times are unix seconds."""

    started_at_s: float
    ended_at_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    fingerprint: str = ""  # of the forward pass that answered
    error: str = ""


async def ask(http: httpx.AsyncClient, url: str, model: str, prompt: list[int], output_tokens: int) -> Answered:
    started_at_s = time.time()
    body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
    try:
        answer = await http.post(f"{url}/v1/completions", json=body, headers={"Connection": "close"})
        answer.raise_for_status()
        said = answer.json()
    except (httpx.HTTPError, ValueError) as err:
        return Answered(started_at_s, time.time(), len(prompt), error=f"{type(err).__name__}: {err}")
    usage = said["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answered(
        started_at_s,
        time.time(),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        cached,
        said["system_fingerprint"],
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    timeout = httpx.Timeout(REQUEST_DEADLINE_S)
    limits = httpx.Limits(max_connections=MAX_IN_FLIGHT, max_keepalive_connections=0)
    with args.out.open("a") as out:
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http:
            await send_until_eof(stdin, http, args.url, args.model, random.Random(args.seed), out)


async def send_until_eof(
    stdin: asyncio.StreamReader, http: httpx.AsyncClient, url: str, model: str, rng: random.Random, out: TextIO
) -> None:
    in_flight: set[asyncio.Task[None]] = set()

    async def one(prompt: list[int], output_tokens: int) -> None:
        answered = await ask(http, url, model, prompt, output_tokens)
        print(json.dumps(asdict(answered)), file=out, flush=True)

    mix: Mix | None = None
    next_line = asyncio.create_task(stdin.readline())
    while True:
        pause_s = 1.0 / mix.per_second if mix else None
        done, _ = await asyncio.wait({next_line}, timeout=pause_s)
        if done:
            line = next_line.result()
            if not line:
                break
            mix = Mix(**json.loads(line))
            next_line = asyncio.create_task(stdin.readline())
        elif mix and len(in_flight) < MAX_IN_FLIGHT:
            task = asyncio.create_task(one(mix.prompt(rng), mix.output_tokens))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
    if in_flight:
        await asyncio.wait(in_flight, timeout=REQUEST_DEADLINE_S)


if __name__ == "__main__":
    asyncio.run(main())
