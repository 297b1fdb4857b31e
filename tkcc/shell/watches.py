"""Which watches are alive: what the liveness probe asks.

kopf reopens each watch when the server ends it (`server_timeout`) or when it has been silent (`inactivity_timeout`), so
a living watch has either delivered an event or been answered anew within that time. One that did neither is a zombie:
the operator would serve on without ever hearing of a new object, and only a restart helps.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import aiohttp


class Watches:
    """The last sign of life of each watch, in seconds of `clock`. Watches are known by resource, or by
    namespace/resource where the operator serves single namespaces."""

    def __init__(
        self,
        resources: Iterable[str],
        limit_s: float,
        clock: Callable[[], float],
        on_sign: Callable[[str], None] = lambda watch: None,
    ):
        self._clock = clock
        self._limit_s = limit_s
        self._on_sign = on_sign
        self._resources = frozenset(resources)
        # Starting counts as a sign of life: what then never comes is a stalled watch.
        self._last_s = dict.fromkeys(self._resources, clock())

    def saw(self, resource: str, namespace: str = "") -> None:
        if resource not in self._resources:
            return
        if namespace:
            self._last_s.pop(resource, None)
        watch = f"{namespace}/{resource}" if namespace else resource
        self._last_s[watch] = self._clock()
        self._on_sign(watch)

    def stalled(self) -> dict[str, float]:
        """Silent seconds of each watch that has been silent for longer than the limit."""
        now = self._clock()
        return {watch: now - at for watch, at in self._last_s.items() if now - at > self._limit_s}

    def trace(self) -> aiohttp.TraceConfig:
        """For the HTTP session of whoever watches: an answered list or watch request is a sign of life."""

        async def answered(
            session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestEndParams
        ) -> None:
            if params.response.status < 300 and params.method == "GET":
                self.saw(*_watched(params.url.path))

        config = aiohttp.TraceConfig()
        config.on_request_end.append(answered)
        return config


def _watched(path: str) -> tuple[str, str]:
    """(resource, namespace or "") of a list or watch path."""
    parts = path.strip("/").split("/")
    namespace = parts[-2] if len(parts) >= 3 and parts[-3] == "namespaces" else ""
    return parts[-1], namespace
