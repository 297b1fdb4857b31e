"""From logits to tokens, on the logits' device: greedy, temperature, top_p, and logprobs. One device sync in all.

Random numbers come from the host, one uniform number per request and token out of the request's own generator: a seed
gives the same text on every device and in every batch, as far as the logits are the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tkcc.engine.serve.request import Request, SampledToken, TokenLogprobs


class NonFiniteLogitsError(Exception):
    """The forward pass returned NaN or infinity: no token may be made of that."""


def sample(logits_bv: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """One token per row. Raises NonFiniteLogitsError."""
    assert logits_bv.shape[0] == len(requests), (logits_bv.shape, len(requests))
    logits_bv = logits_bv.float()
    tokens_b = logits_bv.argmax(-1)
    drawn = [i for i, request in enumerate(requests) if not request.sampling.is_greedy]
    if drawn:
        rows_b = torch.tensor(drawn, device=logits_bv.device)
        tokens_b[rows_b] = _draw(logits_bv[rows_b], [requests[i] for i in drawn])
    num_top = max((r.sampling.num_logprobs for r in requests if r.sampling.num_logprobs is not None), default=None)
    columns = [tokens_b[:, None].double(), torch.isfinite(logits_bv.sum(-1, keepdim=True)).double()]
    if num_top is not None:
        logprobs_bv = logits_bv.log_softmax(-1)
        columns.append(logprobs_bv.gather(1, tokens_b[:, None]).double())
        top_bn, ids_bn = logprobs_bv.topk(num_top, dim=-1)
        columns += [top_bn.double(), ids_bn.double()]  # float64 holds every token id exactly
    rows = torch.cat(columns, dim=1).tolist()  # the step's only device sync
    if not all(row[1] for row in rows):
        raise NonFiniteLogitsError("the forward pass returned logits that are not finite")
    return [_sampled(row, request.sampling.num_logprobs, num_top) for row, request in zip(rows, requests, strict=True)]


def _draw(logits_bv: Tensor, requests: Sequence[Request]) -> Tensor:
    """[B] tokens by inverse transform sampling: the first whose cumulative probability passes the uniform number."""
    device = logits_bv.device
    temperature_b = torch.tensor([r.sampling.temperature for r in requests], device=device)
    uniform_b = torch.tensor([r.rng.random() for r in requests], device=device)
    probs_bv = (logits_bv / temperature_b[:, None]).softmax(-1)
    if all(r.sampling.top_p >= 1 for r in requests):
        return _first_above(probs_bv, uniform_b)
    top_p_b = torch.tensor([r.sampling.top_p for r in requests], device=device)
    sorted_bv, ids_bv = probs_bv.sort(-1, descending=True)
    # The nucleus: tokens before which less than top_p is gathered; the likeliest always belongs to it.
    outside_bv = sorted_bv.cumsum(-1) - sorted_bv >= top_p_b[:, None]
    outside_bv[:, 0] = False
    return ids_bv.gather(1, _first_above(sorted_bv.masked_fill(outside_bv, 0.0), uniform_b)[:, None])[:, 0]


def _first_above(weights_bv: Tensor, uniform_b: Tensor) -> Tensor:
    """[B] index of the first running sum above uniform x total. Weights of zero are never chosen."""
    sums_bv = weights_bv.double().cumsum(-1)
    target_b1 = uniform_b[:, None].double() * sums_bv[:, -1:]
    return torch.searchsorted(sums_bv, target_b1, right=True)[:, 0].clamp(max=weights_bv.shape[1] - 1)


def _sampled(row: list[float], num_logprobs: int | None, num_top: int | None) -> SampledToken:
    if num_logprobs is None or num_top is None:
        return SampledToken(int(row[0]))
    values, ids = row[3 : 3 + num_top], row[3 + num_top :]
    top = tuple((int(i), value) for i, value in zip(ids[:num_logprobs], values[:num_logprobs], strict=True))
    return SampledToken(int(row[0]), TokenLogprobs(row[2], top))
