"""How much of a trace's prompts a prefix cache can save, and which requests belong together.

Hit ratios are token-weighted and count whole leading blocks only. The infinite cache is the bound for any cache; it
starts cold, so a rising ratio at the start of a trace is not drift.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from tkcc.traffic.trace import Trace, TraceRequest

# A block in more than this share of all requests is a prefix that everybody has (a system prompt), not a conversation.
_COMMON_RATIO = 0.05


def infinite_hit_ratio(trace: Trace) -> float:
    """Share of prompt tokens that a cache which never evicts would have had, 0-1."""
    seen: set[int] = set()
    hit_tokens = 0
    for request in trace.requests:
        shared = _leading(request.block_ids, seen)
        hit_tokens += min(shared * trace.block_tokens, request.prompt_tokens)
        seen.update(request.block_ids)
    return hit_tokens / trace.num_prompt_tokens


def lru_hit_ratio(trace: Trace, capacity_tokens: int) -> float:
    """The same with a cache of `capacity_tokens` that drops what was least recently used, a prompt's tail before its
    head."""
    if trace.block_tokens == 0:
        return 0.0
    capacity = capacity_tokens // trace.block_tokens
    cached: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for request in trace.requests:
        shared = _leading(request.block_ids, cached)
        hit_tokens += min(shared * trace.block_tokens, request.prompt_tokens)
        for block in reversed(request.block_ids):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hit_tokens / trace.num_prompt_tokens


def sessions(requests: Sequence[TraceRequest]) -> list[int]:
    """A session number per request. Where the trace does not tell, requests are one session when they share the first
    block that is not common to many requests; a request without such a block is a session of its own."""
    uses = Counter(block for request in requests for block in set(request.block_ids))
    common = {block for block, count in uses.items() if count > max(2, _COMMON_RATIO * len(requests))}
    numbers: dict[tuple[str, int], int] = {}
    out = []
    for index, request in enumerate(requests):
        own = next((block for block in request.block_ids if block not in common), None)
        if request.session >= 0:
            key = ("told", request.session)
        elif own is not None:
            key = ("block", own)
        else:
            key = ("alone", index)
        out.append(numbers.setdefault(key, len(numbers)))
    return out


def _leading(block_ids: Sequence[int], known: set[int] | OrderedDict[int, None]) -> int:
    """How many blocks from the start are known."""
    for count, block in enumerate(block_ids):
        if block not in known:
            return count
    return len(block_ids)
