"""The persistent decode step on a CPU: the CUDA source in an unfriendly emulator, against twin and reference."""

import shutil

import pytest
import torch
from emulator import EmulatedDecode
from torch import Tensor

from tests.kernels.pasts import give_pasts
from tkcc.kernels.decode_plan import MAX_SLOTS, Layout
from tkcc.kernels.decode_reference import ReferenceDecode, random_weights
from tkcc.kernels.decode_shape import DecodeShape
from tkcc.kernels.decode_twin import DecodeTwin
from tkcc.kernels.persistent_decode import slot_words

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is built with g++")

LLAMA = DecodeShape(2, 200, 3, 1, 64, 520, 517, tied=True)  # no width is a multiple of a tile
QWEN = DecodeShape(2, 136, 4, 2, 128, 264, 301, tied=False, qk_norm=True, eps=1e-6)
SMALL = Layout(warps=2, slots=3, part_floats=64)


def make(
    shape: DecodeShape, past: list[int], layout: Layout, grid: int, min_blocks: int, directory=None
) -> EmulatedDecode:
    """A decoder whose sequences have random pasts and NaNs after them."""
    decoder = EmulatedDecode(
        shape,
        random_weights(shape, seed=1),
        batch=len(past),
        kv_capacity=max(past) + 9,
        layout=layout,
        grid=grid,
        device="cpu",
    )
    if directory:
        decoder.build(directory)
    decoder.min_blocks, decoder.max_spins = min_blocks, 100_000
    give_pasts(decoder, past, torch.Generator().manual_seed(2))
    return decoder


def last_exchange(decoder: EmulatedDecode) -> dict[str, list[Tensor]]:
    """What the last step's stages handed on, from the kernel's own buffer: as `StageOutputs`, without attention."""
    s, batch = decoder.shape, decoder.batch
    parity = (int(decoder._counters[32]) - 1) & 1
    words, at = decoder.exchange[parity], 0
    read: dict[str, list[Tensor]] = {"qkv": [], "attention": [], "mid": [], "hidden": [], "out": []}
    slots = batch * s.num_kv_heads * MAX_SLOTS * slot_words(s)
    counts = {"qkv": batch * s.qkv_rows, "attention": slots, "hidden": batch * s.ffn // 2}
    for _ in range(s.num_layers):
        for name, values in read.items():
            count = counts.get(name, batch * s.hidden)
            part = words[at : at + count]
            values.append(part.view(torch.bfloat16 if name == "hidden" else torch.float32).view(batch, -1))
            at += -(-count // 32) * 32
    del read["attention"]  # in slots, and not merged yet
    return read


@pytest.mark.parametrize(
    "case, shape, past, layout, grid, min_blocks, steps",
    [
        ("a first token has no past", LLAMA, [0], SMALL, 3, 1, 2),
        (
            "a head is split over CTAs, the step crosses a block",
            LLAMA,
            [95],
            Layout(2, 5, 64),
            4,
            1,
            2,
        ),  # loads limited
        ("one CTA has all of a head", LLAMA, [70], Layout(warps=3, slots=2, part_floats=32), 2, 4, 1),
        ("heads of 128 with norms; two sequences", QWEN, [37, 16], SMALL, 5, 1, 2),
        ("three sequences of other lengths share one launch", LLAMA, [33, 0, 100], Layout(2, 3, 64), 5, 1, 1),
    ],
)
def test_equals_its_twin_to_the_last_bit(case, shape, past, layout, grid, min_blocks, steps, tmp_path):
    decoder = make(shape, past, layout, grid, min_blocks, tmp_path)
    twin = DecodeTwin(decoder)
    tokens, positions = decoder.tokens.clone(), list(past)
    out = torch.full((steps, len(past)), -1, dtype=torch.int32)

    decoder.run(steps, out, with_logits=True)

    for step in range(steps):
        logits, stages = twin.step(tokens, positions)
        tokens = logits.argmax(1)
        assert torch.equal(out[step].long(), tokens), f"step {step}"
        positions = [p + 1 for p in positions]
    for name, layers in last_exchange(decoder).items():
        for layer, (got, want) in enumerate(zip(layers, getattr(stages, name), strict=True)):
            assert torch.equal(got, want), f"{name} of layer {layer}"
    assert torch.equal(decoder.logits, logits)
    for got, want in ((decoder.keys, twin.keys), (decoder.values, twin.values)):
        assert torch.equal(got.nan_to_num(99.0), want.nan_to_num(99.0)), "the cache was appended to elsewhere"
    assert decoder.positions.tolist() == positions and decoder.tokens.tolist() == tokens.tolist()


@pytest.mark.parametrize("shape, past", [(LLAMA, [50]), (QWEN, [21, 3])])
def test_twin_is_as_near_to_float32_as_a_plain_bf16_model(shape, past):
    decoder = make(shape, past, SMALL, 5, 1)
    tokens, positions = decoder.tokens.long(), decoder.positions.long()
    plain = {}
    for dtype in (torch.float32, torch.bfloat16):
        caches = [cache.nan_to_num(0.0).to(dtype) for cache in (decoder.keys, decoder.values)]
        model = ReferenceDecode(shape, random_weights(shape, seed=1), *caches, decoder.rope)
        plain[dtype] = model.step(tokens, positions).float()

    logits, _ = DecodeTwin(decoder).step(tokens, past)

    truth = plain[torch.float32]
    error, bound = ((x - truth).norm() / truth.norm() for x in (logits, plain[torch.bfloat16]))
    assert error <= 1.5 * bound, (error, bound)


def test_launches_go_on_where_the_last_one_stopped(tmp_path):
    decoder = make(LLAMA, [30], SMALL, 3, 1, tmp_path)
    together, apart = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    start = [t.clone() for t in (decoder.tokens, decoder.positions, decoder.keys, decoder.values)]
    decoder.run(2, together)
    for tensor, value in zip((decoder.tokens, decoder.positions, decoder.keys, decoder.values), start, strict=True):
        tensor.copy_(value)
    for step in range(2):
        decoder.run(1, apart[step : step + 1], seed=step + 5)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("shape, past", [(LLAMA, 30), (QWEN, 14), (LLAMA, 0)])
def test_twin_runs_many_steps_as_it_runs_one(shape, past):
    decoder = make(shape, [past], SMALL, 5, 1)
    tokens = torch.tensor([5, 9, 5, 77])
    one_by_one, together = DecodeTwin(decoder), DecodeTwin(decoder)

    logits = together.steps(tokens, past)

    for step, token in enumerate(tokens):
        expected, _ = one_by_one.step(token[None], [past + step])
        assert torch.equal(logits[step], expected[0]), f"step {step}"
    assert torch.equal(one_by_one.keys.nan_to_num(99.0), together.keys.nan_to_num(99.0))
