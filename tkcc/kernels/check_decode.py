"""Whether the persistent step is right on a device: against float32, its twin, poison, and time.

    python -m tkcc.kernels.check_decode accuracy|twin|soak|tiny

`tiny` (two layers, contexts 16 and 300) is what compute-sanitizer runs.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tkcc.kernels.decode_reference import ReferenceDecode, random_weights
from tkcc.kernels.decode_shape import SHAPES, DecodeShape
from tkcc.kernels.decode_twin import DecodeTwin
from tkcc.kernels.persistent_decode import PersistentDecode, rope_table


def make(shape: DecodeShape, past: Sequence[int], room: int, options: tuple[str, ...] = ()) -> PersistentDecode:
    """A decoder with random pasts, NaNs after them and in the outputs."""
    weights = random_weights(shape, 1, "cuda")
    decoder = PersistentDecode(shape, weights, batch=len(past), kv_capacity=max(past) + room, options=options)
    for cache in (decoder.keys, decoder.values):
        cache.normal_()
    restart(decoder, past)
    return decoder


def restart(decoder: PersistentDecode, past: Sequence[int]) -> None:
    """Sequences at `past`, everything beyond poisoned."""
    for cache in (decoder.keys, decoder.values):
        cache.nan_to_num_(nan=0.5)
        for b, count in enumerate(past):
            cache[:, b, :, count:] = torch.nan
    decoder.tokens.copy_(torch.arange(len(past)) * 7 + 11)
    decoder.positions.copy_(torch.tensor(past))
    decoder.logits.fill_(torch.nan)


def accuracy(shape: DecodeShape, contexts: Sequence[int]) -> None:
    """Error of the logits against float32, ours and the plain bf16 model's, after one step at each context."""
    decoder = make(shape, [max(contexts)], 64)
    weights = random_weights(shape, 1, "cuda")
    out = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    for context in contexts:
        restart(decoder, [context])
        tokens, positions = decoder.tokens.long(), decoder.positions.long()
        capacity = context + 1
        plain = {}
        for dtype in (torch.float32, torch.bfloat16):
            keys, values = (c[:, :, :, :capacity].nan_to_num(0.0).to(dtype) for c in (decoder.keys, decoder.values))
            plain[dtype] = ReferenceDecode(shape, weights, keys, values, decoder.rope).step(tokens, positions).float()
        decoder.run(1, out, with_logits=True)
        truth = plain[torch.float32]
        ours, bf16 = (float((x - truth).norm() / truth.norm()) for x in (decoder.logits, plain[torch.bfloat16]))
        verdict = "ok" if ours <= 1.5 * bf16 else "WRONG"
        print(f"accuracy context {context}: ours {ours:.5f}, plain bf16 {bf16:.5f}, ratio {ours / bf16:.3f} {verdict}", flush=True)


def against_twin(shape: DecodeShape, context: int, steps: int) -> None:
    """`steps` dependent steps: every step's logits against the twin, bit for bit, and its token against float32.

    All models are fed our own tokens. A token that float32 would not choose counts as a near tie if float32's gap
    between the two is under twice the error bound (1.5 times the largest error of the plain bf16 model's logits at the
    first step).
    """
    decoder = make(shape, [context], steps + 64)
    start = [t.clone() for t in (decoder.tokens, decoder.positions, decoder.keys, decoder.values)]
    together, alone = (torch.zeros(steps, 1, dtype=torch.int32, device="cuda") for _ in range(2))
    decoder.run(steps, together)
    for tensor, value in zip((decoder.tokens, decoder.positions, decoder.keys, decoder.values), start, strict=True):
        tensor.copy_(value)
    twin = DecodeTwin(decoder)
    capacity = context + steps + 1
    past_keys, past_values = (c[:, :, :, :capacity].nan_to_num(0.0) for c in (decoder.keys, decoder.values))
    logits = torch.empty(steps, shape.vocab, device="cuda")
    for step in range(steps):
        decoder.run(1, alone[step : step + 1], with_logits=True)
        logits[step] = decoder.logits[0]
    same_tokens = torch.equal(together, alone) and torch.equal(logits.argmax(1), alone[:, 0].long())
    fed = torch.cat([start[0], alone[:-1, 0]]).long()
    equal = sum(int((a == b).all(1).sum()) for a, b in zip(twin.steps(fed, context).split(64), logits.split(64), strict=True))
    del twin, decoder

    weights = random_weights(shape, 1, "cuda")
    rope = rope_table(shape, capacity, torch.device("cuda"))
    first = ReferenceDecode(shape, weights, past_keys.clone(), past_values.clone(), rope)
    plain = first.step(fed[:1], start[1].long()).float()
    model = GraphedReference(ReferenceDecode(shape, weights, past_keys.float(), past_values.float(), rope))
    gaps, bound = [], 0.0
    for step in range(steps):
        truth = model.step(fed[step], context + step)[0]
        bound = bound or 1.5 * float((plain[0] - truth).abs().max())
        gaps.append(truth.max() - truth[alone[step, 0].long()])
    gap = torch.stack(gaps)
    ties, wrong = int(((gap > 0) & (gap < 2 * bound)).sum()), int((gap >= 2 * bound).sum())
    print(
        f"twin context {context}: logits of {equal}/{steps} steps bit-equal, tokens of one launch and of {steps} "
        f"{'the same' if same_tokens else 'DIFFERENT'}; against float32: {ties} near ties (bound {bound:.4f}), "
        f"{wrong} wrong; {len(alone.unique())} distinct tokens",
        flush=True,
    )


class GraphedReference:
    """The plain model's step of one sequence in a CUDA graph: launching its kernels one by one takes longer than they do."""

    def __init__(self, model: ReferenceDecode) -> None:
        self.model = model  # the graph reads its weights and caches where they are now
        self.token, self.position = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
        kept = [c[:, :, :, :1].clone() for c in (model.keys, model.values)]  # capturing appends at position 0
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.step(self.token, self.position)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = model.step(self.token, self.position)
        for cache, value in zip((model.keys, model.values), kept, strict=True):
            cache[:, :, :, :1] = value

    def step(self, token: Tensor, position: int) -> Tensor:
        """Logits [1, V], overwritten by the next call."""
        self.token.copy_(token.view(1))
        self.position.fill_(position)
        self.graph.replay()
        return self.logits


def soak(shape: DecodeShape, steps: int) -> None:
    """`steps` dependent steps, 100 a launch."""
    decoder = make(shape, [0], steps + 64)
    out = torch.zeros(100, 1, dtype=torch.int32, device="cuda")
    for _ in range(steps // 100):
        decoder.run(100, out)
    torch.cuda.synchronize()
    logits_at_end = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    decoder.run(1, logits_at_end, with_logits=True)
    finite = bool(decoder.logits.isfinite().all())
    print(f"soak: {int(decoder.positions[0]) - 1} steps without a hang, logits finite: {finite}", flush=True)


def batches(shape: DecodeShape) -> None:
    """Batches 1 to 8 at lengths that are no multiple of anything, against the twin."""
    lengths = [333, 0, 17, 1201, 64, 5, 700, 31]
    for batch in range(1, 9):
        past = lengths[:batch]
        decoder = make(shape, past, 16)
        twin = DecodeTwin(decoder)
        out = torch.zeros(3, batch, dtype=torch.int32, device="cuda")
        tokens = decoder.tokens.clone()
        decoder.run(3, out, with_logits=True)
        same, logits = True, torch.empty(0)
        for step in range(3):
            logits, _ = twin.step(tokens, [p + step for p in past])
            tokens = logits.argmax(1)
            same = same and torch.equal(tokens, out[step].long())
        same = same and torch.equal(logits, decoder.logits)
        print(f"batch {batch} at {past}: {'bit-equal' if same else 'DIFFERENT'}", flush=True)


def tiny(shape: DecodeShape, options: tuple[str, ...]) -> None:
    """Two layers at contexts 16 and 300, two steps each."""
    decoder = make(shape, [300], 64, options)
    decoder.max_spins = 1 << 30
    out = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    for context in (16, 300):
        restart(decoder, [context])
        decoder.run(2, out, with_logits=True)
        torch.cuda.synchronize()
        print(f"tiny context {context}: tokens {out.flatten().tolist()}, finite {bool(decoder.logits.isfinite().all())}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the named checks on one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checks", nargs="+", choices=["accuracy", "twin", "soak", "batches", "models", "tiny"])
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--contexts", type=json.loads, default=[16, 512, 2048, 8192, 32768])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tensor-copies", action="store_true", help="of tiny: copies that racecheck can follow")
    args = parser.parse_args(argv)
    shape = SHAPES[args.model]
    options = ("-DTKCC_TENSOR_COPIES",) if args.tensor_copies else ()
    two_layers = replace(shape, num_layers=2)
    for check in args.checks:
        with torch.no_grad():
            if check == "accuracy":
                accuracy(shape, args.contexts)
            if check == "twin":
                against_twin(shape, 16, args.steps)
            if check == "soak":
                soak(shape, 10_000)
            if check == "batches":
                batches(two_layers)
            if check == "models":
                for name, other in SHAPES.items():
                    print(name, end=": ")
                    against_twin(replace(other, num_layers=2), 100, 3)
            if check == "tiny":
                tiny(replace(two_layers, vocab=4096), options)


if __name__ == "__main__":
    main()
