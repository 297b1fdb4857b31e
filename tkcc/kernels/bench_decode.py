"""What `tkcc bench decode` measures: the decode step, the read ceiling and three PyTorch baselines, on one device.

Every candidate decodes the same random model greedily, `STEPS` dependent steps a run, embedding and argmax included,
the position moving on the device. Its caches hold the context and no more than a block beyond it.
"""

import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tkcc.kernels.decode_reference import ReferenceDecode, random_weights, rms_norm_ref, rotate_ref
from tkcc.kernels.decode_shape import SHAPES, DecodeShape
from tkcc.kernels.persistent_decode import PersistentDecode, rope_table
from tkcc.kernels.read_stream import ReadStream

STEPS = 16  # dependent steps of one timed run
Row = dict[str, Any]


def time_ms(run: Callable[[], object], runs: int) -> list[float]:
    """Milliseconds of each of `runs` calls, by device events, after five that are not counted."""
    for _ in range(5):
        run()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def make_row(candidate: str, phase: str, context: int, times_ms: list[float], tokens: int, ceiling_ms: float | None) -> Row:
    """A row of the report: times per step (decode) or per prompt (prefill)."""
    median = statistics.median(times_ms)
    quartiles = statistics.quantiles(times_ms, n=4)
    return {
        "candidate": candidate,
        "phase": phase,
        "context": context,
        "ms_median": round(median, 4),
        "ms_min": round(min(times_ms), 4),
        "ms_iqr": round(quartiles[2] - quartiles[0], 4),
        "runs": len(times_ms),
        "tokens_per_s": round(1000 * tokens / median, 1),
        "ceiling_pct": round(100 * ceiling_ms / median, 1) if ceiling_ms else None,
    }


class GraphedStep:
    """A step of B = 1 in a CUDA graph that feeds its own token and position back."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], capture: bool = True) -> None:
        self.tokens = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._step = step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._once()
                self.positions.zero_()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph() if capture else None
        if self._graph:
            with torch.cuda.graph(self._graph):
                self._once()

    def _once(self) -> None:
        self.tokens.copy_(self._step(self.tokens, self.positions).argmax(-1))
        self.positions += 1

    def run(self, context: int) -> None:
        """`STEPS` dependent steps from `context`."""
        self.positions.fill_(context)
        for _ in range(STEPS):
            if self._graph:
                self._graph.replay()
            else:
                torch.compiler.cudagraph_mark_step_begin()
                self._once()


def fuse_layer(weights: dict[str, Tensor], layer: int) -> tuple[Tensor, ...]:
    """norm, q|k|v, o, norm, gate|up, down of one layer."""
    get = lambda name: weights[f"model.layers.{layer}.{name}.weight"]  # noqa: E731
    qkv = torch.cat([get(f"self_attn.{n}_proj") for n in "qkv"])
    gate_up = torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")])
    norms = get("input_layernorm"), get("post_attention_layernorm")
    return norms[0], qkv, get("self_attn.o_proj"), norms[1], gate_up, get("mlp.down_proj")


class StaticCache:
    """The gpt-fast kind of decode: fused projections, a static cache attended to as a whole, layers compiled."""

    def __init__(self, shape: DecodeShape, weights: dict[str, Tensor], capacity: int) -> None:
        self.shape, self.weights = shape, weights
        self.layers = [fuse_layer(weights, layer) for layer in range(shape.num_layers)]
        size = (1, shape.num_kv_heads, capacity, shape.head_dim)
        self.caches = [
            [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in self.layers
        ]
        self.rope = rope_table(shape, capacity, torch.device("cuda"))
        self._layer, self._head = torch.compile(self._layer_eager), torch.compile(self._head_eager)

    def _layer_eager(self, x, weights, cache, position, mask, cosine, sine):
        s = self.shape
        norm, qkv, o, norm2, gate_up, down = weights
        heads = F.linear(rms_norm_ref(x, norm, s.eps), qkv).view(1, -1, s.head_dim)
        q, k, v = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        q, k = rotate_ref(q, cosine, sine), rotate_ref(k, cosine, sine)
        cache[0][:, :, position] = k[:, :, None]
        cache[1][:, :, position] = v[:, :, None]
        group = s.num_heads // s.num_kv_heads
        keys, values = (c.repeat_interleave(group, dim=1) for c in cache)
        attended = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)
        x = x + F.linear(attended.reshape(1, -1), o)
        gate, up = F.linear(rms_norm_ref(x, norm2, s.eps), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    def _head_eager(self, x, norm, head):
        return F.linear(rms_norm_ref(x, norm, self.shape.eps), head)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [1, V]."""
        cosine, sine = self.rope[positions].chunk(2, dim=-1)
        mask = (torch.arange(self.rope.shape[0], device="cuda") <= positions)[None, None, None]
        x = F.embedding(tokens, self.weights["model.embed_tokens.weight"])
        for weights, cache in zip(self.layers, self.caches, strict=True):
            x = self._layer(x, weights, cache, positions, mask, cosine, sine)
        logits: Tensor = self._head(x, self.weights["model.norm.weight"], self.weights["model.embed_tokens.weight"])
        return logits


def bench_ours(shape: DecodeShape, weights: dict[str, Tensor], contexts: Sequence[int], runs: int) -> Iterator[list[Row]]:
    """At each context the read ceiling, and our step with many steps a launch and with one."""
    ours = PersistentDecode(shape, weights, kv_capacity=max(contexts) + 2 * STEPS)
    for cache in (ours.keys, ours.values):
        cache.normal_()
    readers = [ReadStream(4096, warps=8), ReadStream(16384, warps=4)]
    many, one = (torch.zeros(n, 1, dtype=torch.int32, device="cuda") for n in (STEPS, 1))
    for context in contexts:
        kv = shape.kv_bytes(context) // 2
        parts = [(ours.packed, 2 * ours.packed.numel()), (ours.keys, kv), (ours.values, kv)]
        reads = [[t / STEPS for t in time_ms(partial(r.run, parts, STEPS), runs)] for r in readers]
        best = min(reads, key=statistics.median)
        ceiling = statistics.median(best)
        rows = [make_row("read_ceiling", "decode", context, best, 1, ceiling)]
        rows[-1]["TBps"] = round((parts[0][1] + 2 * kv) / ceiling / 1e9, 3)

        def together(context: int = context) -> None:
            ours.positions.fill_(context)
            ours.run(STEPS, many)

        def apart(context: int = context) -> None:
            ours.positions.fill_(context)
            for _ in range(STEPS):
                ours.run(1, one)

        for name, run in (("tkcc", together), ("tkcc_launch_per_step", apart)):
            rows.append(make_row(name, "decode", context, [t / STEPS for t in time_ms(run, runs)], 1, ceiling))
        yield rows


def bench_decode(shape: DecodeShape, weights: dict[str, Tensor], contexts: Sequence[int], runs: int, skip: Set[str]) -> Iterator[list[Row]]:
    """Rows of all candidates at each context, against the ceiling measured in this run."""
    ceilings = {}
    for rows in bench_ours(shape, weights, contexts, runs):
        ceilings[rows[0]["context"]] = rows[0]["ms_median"]
        yield rows
    for context, ceiling in ceilings.items():
        for name in ("cuda_graph", "static_cache", "compile"):
            if name in skip:
                continue
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            capacity = -(-(context + 2 * STEPS) // 32) * 32
            step: Callable[[Tensor, Tensor], Tensor]
            if name == "static_cache":
                step = StaticCache(shape, weights, capacity).step
            else:
                size = (shape.num_layers, 1, shape.num_kv_heads, capacity, shape.head_dim)
                keys, values = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
                rope = rope_table(shape, capacity, torch.device("cuda"))
                step = ReferenceDecode(shape, weights, keys, values, rope).step
                if name == "compile":
                    # Or its graphs are skipped ("mutated inputs"), and the weights copied into them in each step.
                    for tensor in (keys, values, rope, *weights.values()):
                        torch._dynamo.mark_static_address(tensor)
                    step = torch.compile(step, mode="reduce-overhead")
            with torch.no_grad():
                graphed = GraphedStep(step, capture=name != "compile")
                times = time_ms(partial(graphed.run, context), runs)
            yield [make_row(name, "decode", context, [t / STEPS for t in times], 1, ceiling)]


class Prefill:
    """A prompt through all layers with causal SDPA and cuBLAS, its layers compiled; the head sees the last token."""

    def __init__(self, shape: DecodeShape, weights: dict[str, Tensor], tokens: int, fused: bool) -> None:
        self.shape, self.weights, self.fused = shape, weights, fused
        layers = [fuse_layer(weights, layer) for layer in range(shape.num_layers)]
        kv = shape.num_kv_heads * shape.head_dim
        if not fused:  # as checkpoints have them: q, k, v and gate, up apart
            layers = [
                (n, *qkv.split([shape.attention_width, kv, kv]), o, n2, *gu.chunk(2), d) for n, qkv, o, n2, gu, d in layers
            ]
        self.layers = layers
        self.rope = rope_table(shape, tokens, torch.device("cuda"))
        self.ids = torch.randint(shape.vocab, (tokens,), device="cuda")
        size = (shape.num_layers, 2, shape.num_kv_heads, tokens, shape.head_dim)
        self.cache = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        self._layer = torch.compile(self._layer_eager)
        with torch.no_grad():
            for _ in range(2):
                self.forward()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.logits = self.forward()

    def _layer_eager(self, x, weights, cache, cosine, sine):
        s = self.shape
        h = rms_norm_ref(x, weights[0], s.eps)
        if self.fused:
            _, qkv, o, norm2, *w_mlp, down = weights
            heads = F.linear(h, qkv).view(x.shape[0], -1, s.head_dim)
            q, k, v = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        else:
            _, wq, wk, wv, o, norm2, *w_mlp, down = weights
            q, k, v = (F.linear(h, w).view(x.shape[0], -1, s.head_dim) for w in (wq, wk, wv))
        q, k = rotate_ref(q, cosine, sine), rotate_ref(k, cosine, sine)
        cache[0].copy_(k.transpose(0, 1))
        cache[1].copy_(v.transpose(0, 1))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        x = x + F.linear(attended.reshape(x.shape[0], -1), o)
        h = rms_norm_ref(x, norm2, s.eps)
        outs = [F.linear(h, w) for w in w_mlp]
        gate, up = outs[0].chunk(2, dim=-1) if self.fused else outs
        return x + F.linear(F.silu(gate) * up, down)

    def forward(self) -> Tensor:
        """Logits [1, V] of the last token; fills the cache."""
        cosine, sine = self.rope.chunk(2, dim=-1)
        x = F.embedding(self.ids, self.weights["model.embed_tokens.weight"])
        for weights, cache in zip(self.layers, self.cache, strict=True):
            x = self._layer(x, weights, cache, cosine, sine)
        last = rms_norm_ref(x[-1:], self.weights["model.norm.weight"], self.shape.eps)
        return F.linear(last, self.weights["model.embed_tokens.weight" if self.shape.tied else "lm_head.weight"])

    def run(self) -> None:
        """Replays the whole prompt's graph."""
        self._graph.replay()


def bench_prefill(shape: DecodeShape, weights: dict[str, Tensor], lengths: Sequence[int], runs: int) -> Iterator[list[Row]]:
    """`sdpa_compiled`: projections as checkpoints have them; `tkcc`: per cell the faster of that and of fused ones."""
    for length in lengths:
        torch.cuda.empty_cache()
        times = {}
        for fused in (False, True):
            torch._dynamo.reset()
            prefill = Prefill(shape, weights, length, fused)
            times[fused] = time_ms(prefill.run, runs)
            del prefill
        rows = [make_row("sdpa_compiled", "prefill", length, times[False], length, None)]
        fused_wins = statistics.median(times[True]) < statistics.median(times[False])
        rows.append(make_row("tkcc", "prefill", length, times[fused_wins], length, None))
        rows[-1]["choice"] = "fused projections" if fused_wins else "as sdpa_compiled"
        yield rows


def print_rows(rows: Sequence[Row]) -> None:
    """One line a row."""
    for r in rows:
        pct = f"{r['ceiling_pct']:5.1f} %" if r["ceiling_pct"] else "       "
        spread = f"min {r['ms_min']:.4f}, iqr {r['ms_iqr']:.4f}, {r['runs']} runs"
        print(f"{r['phase']:8}{r['context']:6} {r['candidate']:22}{r['ms_median']:9.4f} ms {r['tokens_per_s']:10.1f} tokens/s {pct}  {spread}", flush=True)


def add_ratios(rows: list[Row]) -> None:
    """How many times as long as ours each row takes."""
    ours = {(r["phase"], r["context"]): r["ms_median"] for r in rows if r["candidate"] == "tkcc"}
    for r in rows:
        r["ratio_to_tkcc"] = round(r["ms_median"] / ours[r["phase"], r["context"]], 3)


def bench(
    model: str,
    contexts: Sequence[int],
    prefill: Sequence[int],
    runs: int,
    skip: Set[str],
    *,
    command: str,
    commit: str | None,
    json_path: Path | None,
) -> None:
    """Measures and prints all rows; writes the JSON that docs/log.md refers to. Takes minutes."""
    shape = SHAPES[model]
    weights = random_weights(shape, seed=1, device="cuda")
    rows: list[Row] = []
    for part in (bench_decode(shape, weights, contexts, runs, skip), bench_prefill(shape, weights, prefill, runs)):
        for more in part:
            rows += more
            print_rows(more)
            if json_path:  # as soon as they are there: what is cut short keeps what it has
                _write(json_path, rows, command, commit)


def _write(path: Path, rows: list[Row], command: str, commit: str | None) -> None:
    add_ratios(rows)
    report = {
        "environment": {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "command": command,
        "commit": _head() if commit is None else commit,
        "metrics": {
            "read_ceiling_TBps": max(r["TBps"] for r in rows if r["candidate"] == "read_ceiling"),
            "steps_per_run": STEPS,
            "rows": rows,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _head() -> str:
    """The checkout's commit, or nothing."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
