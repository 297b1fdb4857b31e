"""Where the persistent step's time goes: clocks of each warp at each stage, on a device.

    python -m tkcc.kernels.trace_decode --contexts 16,2048

A build with TKCC_TRACE writes them down (cuda/ptx.cu). Times are cycles from the median start of a layer, means over the
middle layers of the last of four steps; `slowest` is that of the last CTA of a layer.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tkcc.kernels.decode_reference import random_weights
from tkcc.kernels.decode_shape import SHAPES
from tkcc.kernels.persistent_decode import TRACE_EVENTS, TRACE_LOADS, PersistentDecode

WAITED = 3  # an event that is a duration: cycles that a warp waited for its stream
STAGES = ("qkv", "attention, o", "gate, up", "down")
EVENTS = {
    0: "stage begins",
    9: "q, k, v there",
    11: "blocks attended",
    14: "attention published",
    7: "first unit taken",
    8: "residual there",
    2: "input there",
    WAITED: "(waited for units)",
    4: "products done",
    6: "published",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """One step's clocks, each CTA's from its own first event on."""

    events: Tensor  # [CTA, stage, warp, event] float64, NaN where there is none
    l2_cycles: Tensor  # of reads that hit L2, all along the launch

    def layer_starts(self) -> Tensor:
        """[layers + 1]: medians over CTAs and warps; the last is the head's."""
        return self.events[:, ::4, :, 0].transpose(0, 1).flatten(1).median(1).values


def record(decoder: PersistentDecode, context: int) -> Trace:
    """Runs four steps twice (the first time warms up) and reads the last one's clocks."""
    layers, warps, grid = decoder.shape.num_layers, decoder.layout.warps, decoder.grid
    out = torch.zeros(4, decoder.batch, dtype=torch.int32, device=decoder.device)
    for _ in range(2):
        decoder.trace.zero_()
        decoder.positions.fill_(context)
        decoder.run(4, out)
    raw = decoder.trace.cpu()
    size = grid * (4 * layers + 1) * warps * TRACE_EVENTS
    events = raw[:size].view(grid, 4 * layers + 1, warps, TRACE_EVENTS).double()
    relative = events - events[:, :1, :, :1].amin((1, 2), keepdim=True)
    relative[..., WAITED] = events[..., WAITED]
    probes = raw[size + grid * warps * TRACE_LOADS :]
    return Trace(relative.masked_fill(events == 0, torch.nan), (probes[probes > 0] & 0xFFFF).double() / 8)


def report(trace: Trace) -> list[str]:
    """One line for each event of a layer."""
    starts = trace.layer_starts()
    middle = range(len(starts) // 4, len(starts) - 1)
    head = float(trace.events[:, -1, :, 6].nanmedian() - starts[-1])
    lines = [f"layer {float(starts.diff()[list(middle)].mean()):.0f} cycles, head {head:.0f}"]
    for stage, name in enumerate(STAGES):
        for event, label in EVENTS.items():
            at = trace.events[:, [4 * layer + stage for layer in middle], :, event].permute(1, 0, 2)  # [layer, CTA, warp]
            if at.isnan().all():
                continue
            if event != WAITED:
                at = at - starts[list(middle)][:, None, None]
            of_cta = at.nan_to_num(-torch.inf).amax(2)  # its last warp
            there = of_cta[of_cta.isfinite()]
            lines.append(
                f"{name:13}{label:22} mean {float(there.mean()):7.0f}  5 % {float(there.quantile(0.05)):7.0f}"
                f"  95 % {float(there.quantile(0.95)):7.0f}  slowest {float(of_cta.amax(1).mean()):7.0f}"
            )
    quantiles = trace.l2_cycles.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    lines.append("a read that hits L2: {:.0f}, {:.0f}, {:.0f} cycles (10, 50, 90 %)".format(*quantiles.tolist()))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table for each context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--contexts", default="16,2048")
    args = parser.parse_args(argv)
    contexts = [int(n) for n in args.contexts.split(",")]
    shape = SHAPES[args.model]
    weights = random_weights(shape, 1, "cuda")
    decoder = PersistentDecode(shape, weights, kv_capacity=max(contexts) + 16, options=("-DTKCC_TRACE",))
    for cache in (decoder.keys, decoder.values):
        cache.normal_()
    for context in contexts:
        print(f"context {context}", *report(record(decoder, context)), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
