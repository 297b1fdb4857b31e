"""The serving process: opens both ports, loads the model behind them, serves, drains, and ends with an exit code.

The ports are open from the start, so that probes see "loading" rather than nothing. SIGTERM drains: health turns 503 at
once, requests are accepted for `drain_accept_s` more (endpoints take a moment to change), what runs is finished within
`drain_finish_s`, then the process exits. A second SIGTERM, or a SIGINT, skips the waiting.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

import tkcc
from tkcc.engine.artifact import ArtifactError
from tkcc.engine.serve.accounts import Accounts
from tkcc.engine.serve.admin import AdminApi, utc_iso
from tkcc.engine.serve.api import PublicApi, Served
from tkcc.engine.serve.chat import ChatTemplate, ChatTemplateError
from tkcc.engine.serve.cold_start import ColdStart
from tkcc.engine.serve.engine import Engine, EngineBrokenError
from tkcc.engine.serve.kv_blocks import BlockPool
from tkcc.engine.serve.loading import Loaded, load
from tkcc.engine.serve.metrics import Metrics
from tkcc.engine.serve.options import ServeOptions
from tkcc.engine.serve.recording import Recorder
from tkcc.engine.serve.request_log import RequestLog
from tkcc.engine.serve.scheduler import Scheduler, SchedulerConfig
from tkcc.models.checkpoint import CheckpointError

EXIT_OK, EXIT_BROKEN, EXIT_REFUSED = 0, 1, 2
EXIT_STOPPED_LOADING = 3  # to the outside it is EXIT_OK
LOAD_AGAIN_S = 10.0


class Server:
    """One server's life. `run` and `stop` belong to one event loop; `say` gets lines for people."""

    def __init__(self, options: ServeOptions, cold_start: ColdStart, say: Callable[[str], None]) -> None:
        self._options = options
        self._cold_start = cold_start
        self._say = say
        self._started_at = utc_iso(time.time())
        recorder = Recorder(options.record, options.block_tokens) if options.record else None
        self._accounts = Accounts(Metrics(), RequestLog(options.log_requests), recorder, options.block_tokens)
        name = options.served_model_name or options.model.resolve().name
        self._public = PublicApi(name, self._accounts, options.request_timeout_s)
        self._info: dict[str, Any] | None = None
        self._load_error = ""
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    def stop(self, number: signal.Signals) -> None:
        """What a signal does: SIGTERM drains, SIGINT or any second one ends at once."""
        self._signals.put_nowait(number)

    async def run(self) -> int:
        """Serve until stopped; returns the process's exit code. What went wrong is said in one line."""
        runners: list[web.AppRunner] = []
        try:
            with self._cold_start.phase("listen"):
                admin = AdminApi(self._public, self._accounts, lambda: self._info, lambda: self._load_error)
                public_app = self._public.app(self._options.max_body_bytes)
                runners.append(await _listen(public_app, self._options.host, self._options.port))
                runners.append(await _listen(admin.app(), self._options.host, self._options.admin_port))
            return await self._load_and_serve([runner.addresses[0] for runner in runners])
        except (CheckpointError, ArtifactError, ChatTemplateError, ListenError) as err:
            self._say(f"tkcc: {err}")
            return EXIT_REFUSED
        except EngineBrokenError as err:
            self._say(f"tkcc: the engine is broken: {err}")
            return EXIT_BROKEN
        finally:
            for runner in runners:
                await runner.cleanup()

    async def _load_and_serve(self, addresses: list[tuple[str, int]]) -> int:
        stopping = asyncio.create_task(self._signals.get())
        loaded = await self._load(stopping)
        if loaded is None:
            self._say("tkcc: stopped while loading")
            return EXIT_STOPPED_LOADING
        engine = self._start(loaded)
        (host, port), (_, admin_port) = addresses[0][:2], addresses[1][:2]
        self._say(
            f"tkcc: serving {self._public.model_name} on http://{host}:{port}, admin port {admin_port},"
            f" after {self._cold_start.phases_s['total']:.1f} s"
        )
        stepping = asyncio.create_task(engine.run())
        try:
            await asyncio.wait({stepping, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stepping.done():
                await stepping  # raises EngineBrokenError
            await self._drain(engine, stepping, stopping.result())
        finally:
            stopping.cancel()
            stepping.cancel()
            engine.close()
        return EXIT_OK

    async def _load(self, stopping: asyncio.Task[signal.Signals]) -> Loaded | None:
        """The model; None when a signal came first. With `wait_for_model` weights that are not there yet, or not whole,
        are waited for: in a cluster somebody may still be copying them. An artifact that does not load is never."""
        while True:
            loading = asyncio.create_task(asyncio.to_thread(load, self._options, self._cold_start))
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return None
            try:
                return loading.result()
            except CheckpointError as err:
                if not self._options.wait_for_model:
                    raise
                if str(err) != self._load_error:
                    self._say(f"tkcc: {err}; trying again every {LOAD_AGAIN_S:.0f} s")
                self._load_error = str(err)
            await asyncio.wait({stopping}, timeout=LOAD_AGAIN_S)
            if stopping.done():
                return None

    def _start(self, loaded: Loaded) -> Engine:
        options, spec = self._options, loaded.runner.spec
        pool = BlockPool(spec.num_blocks - 1)  # without the scratch block
        scheduler_config = SchedulerConfig(options.block_tokens, options.max_running, options.chunk_tokens)
        scheduler = Scheduler(scheduler_config, pool)
        accounts = self._accounts
        engine = Engine(scheduler, loaded.runner.run, options.limits, accounts.start, accounts.end)
        metrics = accounts.metrics
        metrics.watch("requests_running", "Requests in the running batch", lambda: engine.num_running)
        metrics.watch("requests_waiting", "Requests in the queue", lambda: engine.num_waiting)
        metrics.watch("kv_usage_ratio", "KV blocks that requests hold, of all", lambda: pool.usage_ratio)
        tokenizer = loaded.tokenizer
        template = tokenizer.chat_template and ChatTemplate(
            tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token
        )
        self._public.served = Served(
            engine=engine,
            tokenizer=tokenizer,
            template=template or None,
            vocab_size=loaded.config.vocab_size,
            max_context=_max_context(options, loaded),
            fingerprint=f"fp_{loaded.artifact_digest[:16]}",
        )
        self._info = {
            "artifactDigest": loaded.artifact_digest,
            "baselineDigest": loaded.baseline_digest,
            "modelDigest": loaded.model_digest,
            "engineVersion": tkcc.__version__,
            "device": loaded.device_name,
            "dtype": loaded.dtype,
            "startedAt": self._started_at,
            "blockTokens": options.block_tokens,
            "recording": accounts.recorder is not None,
        }
        self._cold_start.finish()
        for phase, seconds in self._cold_start.phases_s.items():
            metrics.cold_start.labels(phase).set(seconds)
        return engine

    async def _drain(self, engine: Engine, stepping: asyncio.Task[None], first: signal.Signals) -> None:
        """Let what runs finish; another signal, or a broken engine, ends the waiting."""
        self._public.is_draining = True
        patience = asyncio.create_task(self._signals.get())

        async def wait_for(work: Awaitable[None]) -> None:
            task = asyncio.ensure_future(work)
            await asyncio.wait({task, patience, stepping}, return_when=asyncio.FIRST_COMPLETED)
            task.cancel()

        if first is signal.SIGTERM:
            self._say(f"tkcc: draining, {engine.num_running} running and {engine.num_waiting} waiting")
            await wait_for(asyncio.sleep(self._options.drain_accept_s))
            if not patience.done():
                await wait_for(engine.drain(self._options.drain_finish_s))
        patience.cancel()
        await engine.drain(0)
        await asyncio.sleep(0.05)  # handlers write their last chunk


class ListenError(Exception):
    """A port cannot be opened."""


async def _listen(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Open a port. Raises ListenError."""
    # handler_cancellation: a client that goes away cancels its handler, which ends its request in the engine.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as err:
        await runner.cleanup()
        raise ListenError(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
    return runner


def _max_context(options: ServeOptions, loaded: Loaded) -> int:
    """Most tokens of prompt and answer: what the model was made for and the whole KV cache can hold."""
    spec = loaded.runner.spec
    in_cache = (spec.num_blocks - 1) * spec.block_tokens + 1  # the last token sampled is never in the cache
    return min(loaded.config.max_positions, in_cache, options.max_context or in_cache)


def serve(options: ServeOptions, cold_start: ColdStart) -> int:
    """Run one server in this process until a signal ends it; returns the exit code."""

    async def run() -> int:
        server = Server(options, cold_start, lambda text: print(text, file=sys.stderr, flush=True))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop, number)
        code = await server.run()
        if code in (EXIT_BROKEN, EXIT_STOPPED_LOADING):
            # A thread may hang in a step, or load for a minute yet, and Python would wait for it.
            os._exit(EXIT_BROKEN if code == EXIT_BROKEN else EXIT_OK)
        return code

    return asyncio.run(run())
