"""Recordings of several pods as one that fits into a ConfigMap. Pure.

Requests keep their real distances in time, so that the merged recording interleaves and overlaps as it was served. What
does not fit is cut from the oldest requests.
"""

import gzip
import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import accumulate

from tkcc.api.codec import to_json
from tkcc.api.workload import RecordedRequest, Recording

MAX_PACKED_BYTES = 600_000  # base64 makes 800 kB of it; an object may have 1 MiB
MAX_BLOCKS = 300_000  # hashes of prefix blocks, 40 bytes each in memory; a third of it already fills the packed bytes


def merged(recordings: Sequence[Recording], until: datetime | None, max_requests: int) -> Recording | None:
    """The newest requests that arrived by `until`, at most `max_requests` with at most MAX_BLOCKS; None without any.
    Recordings with other block sizes than the first are left out, because their hashes would not compare. One whose
    place in time is unknown is taken to start with the earliest."""
    recordings = [recording for recording in recordings if recording.requests]
    if not recordings:
        return None
    first = recordings[0]
    recordings = [recording for recording in recordings if recording.block_tokens == first.block_tokens]
    known = [recording.started_at_ms for recording in recordings if recording.started_at_ms]
    earliest_ms = min(known, default=0)
    by_time = heapq.merge(*(_placed(recording, earliest_ms) for recording in recordings), key=lambda item: item[0])
    limit_ms = until.timestamp() * 1000 if until and known else float("inf")
    kept = [(at_ms, request) for at_ms, request in by_time if at_ms <= limit_ms][-max_requests:]
    blocks = list(accumulate(len(request.block_hashes) for _, request in reversed(kept)))
    kept = kept[-max(1, bisect_right(blocks, MAX_BLOCKS)) :]
    if not kept:
        return None
    start_ms = kept[0][0]
    requests = tuple(replace(request, arrival_ms=at_ms - start_ms) for at_ms, request in kept)
    return replace(first, requests=requests, started_at_ms=start_ms if known else 0)


def fitted(recording: Recording, max_bytes: int = MAX_PACKED_BYTES) -> Recording:
    """Without as many of the oldest requests as make it fit when packed."""
    while len(recording.requests) > 1 and len(gzip.compress(to_json(recording).encode(), mtime=0)) > max_bytes:
        kept = recording.requests[len(recording.requests) // 4 + 1 :]
        shift_ms = kept[0].arrival_ms
        requests = tuple(replace(request, arrival_ms=request.arrival_ms - shift_ms) for request in kept)
        start_ms = recording.started_at_ms + shift_ms if recording.started_at_ms else 0
        recording = replace(recording, requests=requests, started_at_ms=start_ms)
    return recording


def _placed(recording: Recording, earliest_ms: int) -> Iterator[tuple[int, RecordedRequest]]:
    start_ms = recording.started_at_ms or earliest_ms
    for request in sorted(recording.requests, key=lambda request: request.arrival_ms):
        yield start_ms + request.arrival_ms, request
