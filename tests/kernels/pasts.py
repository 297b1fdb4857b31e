"""Where a decoder of a test begins."""

import torch

from tkcc.kernels.persistent_decode import PersistentDecode


def give_pasts(decoder: PersistentDecode, past: list[int], generator: torch.Generator | None = None) -> None:
    """Sequences with random pasts of these lengths, NaNs after them and in the outputs."""
    for cache in (decoder.keys, decoder.values):
        cache.normal_(generator=generator)
        for b, count in enumerate(past):
            cache[:, b, :, count:] = torch.nan
    decoder.tokens.copy_(torch.arange(len(past)) * 7 + 3)
    decoder.positions.copy_(torch.tensor(past))
    decoder.logits.fill_(torch.nan)
