"""The ring of metric samples: spaced for the drift windows, bounded, and packed small enough for a ConfigMap. Pure.

One sample a tick and series is enough for a window's increase; the newest is always kept beside them, so that what is
shown is fresh. A series ends with its process, but its samples stay until no window reaches them.
"""

import base64
import gzip
import zlib
from collections.abc import Iterable
from dataclasses import field
from datetime import datetime, timedelta

from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER, from_json, to_json
from tkcc.api.observation import MetricSample
from tkcc.api.spec import DriftSpec

Samples = tuple[MetricSample, ...]  # oldest first

MAX_SAMPLES = 20_000  # some 12 MB in memory
MAX_PACKED_BYTES = 600_000  # base64 makes 800 kB of it; an object may have 1 MiB
_KEY = "samples.json.gz"


@dataclass(frozen=True, config=BORDER)
class Checkpoint:
    samples: Samples = field(default=())


def reach(drift: DriftSpec) -> timedelta:
    """How far back drift may look: the long window as it was `ticks` ticks ago, and a tick of slack at each end."""
    return drift.windows.long + (drift.ticks + 2) * drift.tick


def extend(samples: Samples, new: Iterable[MetricSample], drift: DriftSpec, now: datetime) -> Samples:
    """`samples` with `new` ones added and what is out of reach cut off. Of one series, a newest sample that is less
    than a tick after the one before it gives way to the new one; where so many would be too many, less than more."""
    by_series: dict[str, list[MetricSample]] = {}
    for sample in samples:
        by_series.setdefault(sample.series, []).append(sample)
    new = list(new)
    num_series = len(by_series.keys() | {sample.series for sample in new})
    spacing = max(drift.tick, 2 * num_series * reach(drift) / MAX_SAMPLES)
    for sample in new:
        kept = by_series.setdefault(sample.series, [])
        if kept and sample.at <= kept[-1].at:
            continue  # a page that arrived late tells nothing new
        if len(kept) >= 2 and sample.at - kept[-2].at < spacing:
            kept.pop()
        kept.append(sample)
    oldest = now - reach(drift)
    every = (sample for kept in by_series.values() for sample in kept if sample.at >= oldest)
    return tuple(sorted(every, key=lambda sample: (sample.at, sample.series)))[-MAX_SAMPLES:]


def pack(samples: Samples) -> dict[str, str]:
    """`binaryData` of the checkpoint. The oldest samples are left out where all of them do not fit."""
    while True:
        packed = gzip.compress(to_json(Checkpoint(samples)).encode(), mtime=0)
        if len(packed) <= MAX_PACKED_BYTES:
            return {_KEY: base64.b64encode(packed).decode()}
        samples = samples[len(samples) // 4 + 1 :]


def unpack(binary_data: dict[str, str]) -> Samples:
    """What `pack` packed. Raises ValueError where it was not made by it, or by another version of it."""
    try:
        text = gzip.decompress(base64.b64decode(binary_data[_KEY], validate=True))
    except (KeyError, ValueError, OSError, EOFError, zlib.error) as err:
        raise ValueError(f"no checkpoint of samples: {type(err).__name__}: {err}") from err
    return from_json(Checkpoint, text).samples
