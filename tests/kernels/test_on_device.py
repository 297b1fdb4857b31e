"""The decode step on a real GPU: against its twin, a float32 model, poison, and the command that times it."""

import json

import pytest
import torch

from tests.kernels.pasts import give_pasts
from tkcc.cli import bench_decode
from tkcc.cli.command import CommandError
from tkcc.kernels.decode_plan import Layout
from tkcc.kernels.decode_reference import ReferenceDecode, random_weights
from tkcc.kernels.decode_shape import DecodeShape
from tkcc.kernels.decode_twin import DecodeTwin
from tkcc.kernels.persistent_decode import PersistentDecode

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
on_device = pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of compute capability 9.0")

LLAMA = DecodeShape(2, 1000, 12, 4, 64, 2056, 1021, tied=True)  # no width is a multiple of a tile
QWEN = DecodeShape(2, 1024, 16, 8, 128, 3072, 2048, tied=False, qk_norm=True, rope_theta=1e6, eps=1e-6)


def make(shape: DecodeShape, past: list[int], layout: Layout | None = None) -> PersistentDecode:
    """A decoder whose sequences have random pasts, NaNs after them and in the outputs."""
    weights = random_weights(shape, 1, "cuda")
    decoder = PersistentDecode(shape, weights, batch=len(past), kv_capacity=max(past) + 40, layout=layout)
    give_pasts(decoder, past)
    return decoder


@pytest.mark.gpu
@on_device
@pytest.mark.timeout(300)
@pytest.mark.parametrize("past", [[0], [31], [300], [4100], [333, 0, 17], [5, 64, 700, 31, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=["llama", "qwen"])
def test_equals_its_twin_to_the_last_bit(shape, past):
    decoder = make(shape, past)
    twin = DecodeTwin(decoder)
    tokens, positions = decoder.tokens.clone(), list(past)
    out = torch.full((3, len(past)), -1, dtype=torch.int32, device="cuda")

    decoder.run(3, out, with_logits=True)

    logits = torch.empty(0)
    for step in range(3):
        logits, _ = twin.step(tokens, positions)
        tokens = logits.argmax(1)
        assert torch.equal(out[step].long(), tokens), f"step {step}"
        positions = [p + 1 for p in positions]
    assert torch.equal(decoder.logits, logits)
    assert torch.equal(decoder.keys.nan_to_num(99.0), twin.keys.nan_to_num(99.0))


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("past", [16, 2048])
def test_is_as_near_to_float32_as_a_plain_bf16_model(past):
    decoder = make(LLAMA, [past])
    tokens, positions = decoder.tokens.long(), decoder.positions.long()
    plain = {}
    for dtype in (torch.float32, torch.bfloat16):
        keys, values = (cache.nan_to_num(0.0).to(dtype) for cache in (decoder.keys, decoder.values))
        model = ReferenceDecode(LLAMA, random_weights(LLAMA, 1, "cuda"), keys, values, decoder.rope)
        plain[dtype] = model.step(tokens, positions).float()

    decoder.run(1, torch.zeros(1, 1, dtype=torch.int32, device="cuda"), with_logits=True)

    truth = plain[torch.float32]
    error, bound = ((x - truth).norm() / truth.norm() for x in (decoder.logits, plain[torch.bfloat16]))
    assert error <= 1.5 * bound


@pytest.mark.gpu
@on_device
def test_a_restart_at_a_shorter_context_sees_nothing_of_the_longer_one():
    decoder = make(LLAMA, [2000])
    out = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    decoder.run(1, out[:1])
    for past in (1500, 3, 2000):  # many CTAs a head, one, many
        decoder.tokens.fill_(3)
        decoder.positions.fill_(past)
        twin = DecodeTwin(decoder)
        decoder.run(2, out, with_logits=True)
        first, _ = twin.step(torch.tensor([3], device="cuda"), [past])
        logits, _ = twin.step(first.argmax(1), [past + 1])
        assert torch.equal(decoder.logits, logits), f"at {past}"


@pytest.mark.gpu
@on_device
@pytest.mark.timeout(300)
def test_bench_decode_writes_its_rows(tmp_path, monkeypatch):
    from tkcc.kernels import decode_shape

    monkeypatch.setitem(decode_shape.SHAPES, "small", LLAMA)
    report = tmp_path / "decode.json"
    _run("--model", "small", "--contexts", "20,40", "--prefill", "", "--runs", "3", "--json", str(report), "--skip",
         "cuda_graph,compile,static_cache")  # fmt: skip
    read = json.loads(report.read_text())
    rows = {(row["candidate"], row["context"]): row for row in read["metrics"]["rows"]}
    assert {("tkcc", 20), ("tkcc", 40), ("read_ceiling", 20), ("tkcc_launch_per_step", 40)} <= set(rows)
    assert all(row["ms_min"] <= row["ms_median"] for row in rows.values())
    assert read["metrics"]["read_ceiling_TBps"] > 0 and read["environment"]["device"]


def _run(*argv: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    bench_decode.add_arguments(parser)
    return bench_decode.run(parser.parse_args(argv))


@pytest.mark.skipif(HAS_HOPPER, reason="here it would run")
def test_bench_decode_says_that_it_needs_a_gpu():
    with pytest.raises(CommandError, match=r"compute capability 9\.0"):
        _run("--contexts", "16")


@pytest.mark.parametrize(
    "argv, message",
    [(["--model", "gpt-2"], "no shape 'gpt-2'; there are llama-3.2-1b"), (["--runs", "1"], "three runs")],
)
def test_bench_decode_refuses_what_it_cannot_do(argv, message):
    with pytest.raises(CommandError, match=message):
        _run(*argv)


@pytest.mark.parametrize("argv", [["--contexts", "16,x"], ["--contexts", "0"], ["--skip", "eager"]])
def test_bench_decode_refuses_arguments_of_the_wrong_form(argv, capsys):
    with pytest.raises(SystemExit):
        _run(*argv)
    assert "error: argument" in capsys.readouterr().err
