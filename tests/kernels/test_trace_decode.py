"""The table of a trace: made from clocks whose answers are known."""

import torch

from tkcc.kernels.persistent_decode import TRACE_EVENTS
from tkcc.kernels.trace_decode import WAITED, Trace, report


def test_reports_each_event_from_the_start_of_its_layer():
    layers, ctas, warps, period = 8, 3, 2, 1000.0
    events = torch.full((ctas, 4 * layers + 1, warps, TRACE_EVENTS), torch.nan, dtype=torch.float64)
    for layer in range(layers):
        for stage in range(4):
            events[:, 4 * layer + stage, :, 0] = layer * period + stage * 100
    events[:, 4 * layers, :, 0], events[:, 4 * layers, :, 6] = layers * period, layers * period + 4321
    down = events[:, 3 : 4 * layers : 4]  # [CTA, layer, warp, event]
    starts = torch.arange(layers)[:, None] * period
    for cta in range(ctas):
        down[cta, :, :, 6] = starts + 400 + 10 * cta + torch.tensor([0.0, 5.0])  # the second warp is the last one
    down[..., WAITED] = 77

    lines = report(Trace(events, torch.tensor([260.0, 270.0, 280.0], dtype=torch.float64)))

    assert lines[0] == "layer 1000 cycles, head 4321"
    [published] = [line for line in lines if "published" in line and line.startswith("down")]
    assert published.split()[2:] == ["mean", "415", "5", "%", "405", "95", "%", "425", "slowest", "425"]
    [waited] = [line for line in lines if "waited" in line]
    assert " 77 " in waited
    assert lines[-1].endswith("262, 270, 278 cycles (10, 50, 90 %)")
