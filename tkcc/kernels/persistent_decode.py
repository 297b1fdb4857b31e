"""The decode step as one persistent kernel (cuda/decode.cu): weights packed once, then tokens in, tokens out.

`PersistentDecode` owns the packed weights, the cache and the words that the stages exchange. Its torch reference is
`decode_reference`; its slow twin, bit for bit, is `decode_twin`. The design is told in docs/kernels.md.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tkcc.kernels import nvrtc
from tkcc.kernels.decode_plan import (
    MAX_SLOTS,
    UNIT_BYTES,
    UNIT_COLS,
    UNIT_ROWS,
    Layout,
    block_positions,
    divide_row_groups,
    fit_layout,
    pack_model,
    plan_runs,
    work_table,
)
from tkcc.kernels.decode_shape import DecodeShape

TRACE_EVENTS, TRACE_LOADS, TRACE_PROBES = 16, 1024, 4096  # of a warp's stage; of its stream; of a CTA: cuda/ptx.cu
FILES = ("ptx.cu", "shape.cu", "math.cu", "exchange.cu", "stream.cu", "gemv.cu", "attention.cu", "decode.cu")


_POINTERS: tuple[str, ...] = ("weights", "runs", "run_parts", "work", "embed", "norms", "qk_norms", "rope", "keys", "values")
_POINTERS += ("tokens", "positions", "out_tokens", "logits", "exchange", "best", "counters", "report", "tensor_maps", "trace")


class Params(ctypes.Structure):
    """`struct Params` of cuda/shape.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in ("cta_is_multiprocessor", "kv_capacity", "num_steps", "min_blocks")),
        ("max_spins", ctypes.c_uint32),
    )


def defines(shape: DecodeShape, batch: int, layout: Layout) -> dict[str, str | int]:
    """The TKCC_* names that cuda/shape.cu wants."""
    return {
        "TKCC_BATCH": batch,
        "TKCC_LAYERS": shape.num_layers,
        "TKCC_HIDDEN": shape.hidden,
        "TKCC_HEADS": shape.num_heads,
        "TKCC_KV_HEADS": shape.num_kv_heads,
        "TKCC_HEAD_DIM": shape.head_dim,
        "TKCC_FFN": shape.ffn,
        "TKCC_VOCAB": shape.vocab,
        "TKCC_QK_NORM": str(shape.qk_norm).lower(),
        "TKCC_EPS": f"{to_float32(shape.eps).hex()}f",  # in hex: nothing is left to round
        "TKCC_SCORE_SCALE": f"{score_scale(shape).hex()}f",
        "TKCC_WARPS": layout.warps,
        "TKCC_SLOTS": layout.slots,
        "TKCC_PART_FLOATS": layout.part_floats,
        "TKCC_PARAMS_BYTES": ctypes.sizeof(Params),
        "TKCC_SMEM_BYTES": layout.smem_bytes(shape, batch),
    }


def score_scale(shape: DecodeShape) -> float:
    """What a dot product is multiplied by before a base-2 softmax, rounded to float32."""
    return to_float32(math.log2(math.e) / math.sqrt(shape.head_dim))


def to_float32(value: float) -> float:
    """The nearest float32."""
    return float(torch.tensor(value, dtype=torch.float32))


def exchange_words(shape: DecodeShape, batch: int) -> int:
    """32-bit words of one parity of the exchange buffer."""
    widths = (shape.qkv_rows, shape.hidden, shape.ffn // 2, shape.hidden)
    per_layer = sum(-(-batch * width // 32) * 32 for width in widths)
    return shape.num_layers * (per_layer + batch * shape.num_kv_heads * MAX_SLOTS * slot_words(shape))


def slot_words(shape: DecodeShape) -> int:
    """32-bit words that one CTA's share of a KV head's attention takes: outputs, largest scores, sums."""
    group = shape.num_heads // shape.num_kv_heads
    return -(-(group * shape.head_dim // 2 + 2 * group) // 32) * 32


def rope_table(shape: DecodeShape, positions: int, device: torch.device) -> Tensor:
    """[positions, head_dim] float32: half of it cosines, half sines."""
    frequencies = torch.tensor(shape.inverse_frequencies(), dtype=torch.float64, device=device)
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


class PersistentDecode:
    """Greedy decode of `batch` sequences, any number of dependent steps a launch.

    `weights` are named as in Hugging Face checkpoints, bf16. Every sequence has its own position, given at run time.
    Raises ValueError for a shape that does not fit; `tkcc.kernels.nvrtc.CompileError` if the device's NVRTC is too old.
    """

    def __init__(
        self,
        shape: DecodeShape,
        weights: Mapping[str, Tensor],
        *,
        batch: int = 1,
        kv_capacity: int,
        layout: Layout | None = None,
        grid: int | None = None,
        speeds: Sequence[float] | None = None,
        device: torch.device | str = "cuda",
        options: tuple[str, ...] = (),
    ) -> None:
        self.shape, self.batch = shape, batch
        self.device = torch.device(device)
        self.layout = layout or fit_layout(shape, batch)
        self.grid = grid or torch.cuda.get_device_properties(self.device).multi_processor_count
        self.cta_is_multiprocessor = speeds is not None
        self.min_blocks = self.layout.warps  # of the cache, that a CTA should have: one for each warp
        self.max_spins = 20_000_000  # looks at a word before a launch is given up as stuck
        if self.grid < batch * shape.num_kv_heads:
            raise ValueError(f"{batch} x {shape.num_kv_heads} KV heads need as many CTAs, but the grid has {self.grid}")
        block = block_positions(shape)
        self.kv_capacity = -(-kv_capacity // block) * block

        self._check_part_floats()
        dealt = divide_row_groups(shape, speeds or [1.0] * self.grid)
        self.runs = plan_runs(shape, dealt, self.layout, batch)
        self.packed = pack_model(shape, weights, self.runs, self.device)
        self._work = work_table(dealt).to(self.device)
        self._first_units, self._run_parts = self.runs.first.to(self.device), self.runs.parts.to(self.device)
        self.embed = weights["model.embed_tokens.weight"].to(self.device)
        norm_names = [
            f"model.layers.{layer}.{name}.weight"
            for layer in range(shape.num_layers)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        self.norms = torch.stack([weights[n].to(self.device) for n in [*norm_names, "model.norm.weight"]])
        qk_names = [
            f"model.layers.{layer}.self_attn.{name}_norm.weight" for layer in range(shape.num_layers) for name in "qk"
        ]
        self.qk_norms = torch.stack([weights[n].to(self.device) for n in qk_names]) if shape.qk_norm else None
        self.rope = rope_table(shape, self.kv_capacity, self.device)

        cache = (shape.num_layers, batch, shape.num_kv_heads, self.kv_capacity, shape.head_dim)
        self.keys = torch.zeros(cache, dtype=torch.bfloat16, device=self.device)
        self.values = torch.zeros(cache, dtype=torch.bfloat16, device=self.device)
        self.tokens = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.positions = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(batch, shape.vocab, dtype=torch.float32, device=self.device)

        self.exchange = torch.full((2, exchange_words(shape, batch)), -1, dtype=torch.int32, device=self.device)
        self._best = torch.zeros(2, self.grid, batch, dtype=torch.int64, device=self.device)
        self._counters = torch.zeros(64, dtype=torch.int32, device=self.device)
        self.report = torch.zeros(128, 4, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.trace = torch.zeros(0, dtype=torch.int64, device=self.device)
        if "-DTKCC_TRACE" in options:  # events of each stage and warp; loads of each warp's stream; probes of L2
            of_warp = TRACE_EVENTS * (4 * shape.num_layers + 1) + TRACE_LOADS
            words = self.grid * (self.layout.warps * of_warp + TRACE_PROBES)
            self.trace = torch.zeros(words, dtype=torch.int64, device=self.device)
        self._tensor_maps = None
        if "-DTKCC_TENSOR_COPIES" in options:
            maps = [nvrtc.tensor_map(t, 256, UNIT_BYTES // 512) for t in (self.packed, self.keys, self.values)]
            self._tensor_maps = torch.frombuffer(bytearray(b"".join(maps)), dtype=torch.uint8).to(self.device)
        self._kernel = self._load(options) if self.device.type == "cuda" else None

    def _load(self, options: tuple[str, ...]) -> nvrtc.Kernel:
        source = nvrtc.read_source(FILES, defines(self.shape, self.batch, self.layout))
        return nvrtc.load_kernel(source, "decode_steps", self.layout.smem_bytes(self.shape, self.batch), options)

    def _check_part_floats(self) -> None:
        widest = max(self.shape.hidden, self.shape.attention_width, self.shape.ffn)
        need = -(-widest // UNIT_COLS) * UNIT_ROWS * (1 << (self.batch - 1).bit_length())
        if self.layout.part_floats < need:
            raise ValueError(f"part_floats is {self.layout.part_floats}; one row group needs {need}")

    def params(self, out_tokens: Tensor, num_steps: int, with_logits: bool) -> Params:
        """The launch's arguments; the tensors must outlive it."""
        tensors = {
            "weights": self.packed,
            "runs": self._first_units,
            "run_parts": self._run_parts,
            "work": self._work,
            "embed": self.embed,
            "norms": self.norms,
            "qk_norms": self.qk_norms,
            "rope": self.rope,
            "keys": self.keys,
            "values": self.values,
            "tokens": self.tokens,
            "positions": self.positions,
            "out_tokens": out_tokens,
            "logits": self.logits if with_logits else None,
            "exchange": self.exchange,
            "best": self._best,
            "counters": self._counters,
            "report": self.report,
            "tensor_maps": self._tensor_maps,
            "trace": self.trace,
        }
        addresses = {name: t.data_ptr() if t is not None else None for name, t in tensors.items()}
        return Params(
            **addresses,
            cta_is_multiprocessor=self.cta_is_multiprocessor,
            kv_capacity=self.kv_capacity,
            num_steps=num_steps,
            min_blocks=self.min_blocks,
            max_spins=self.max_spins,
        )

    def run(self, num_steps: int, out_tokens: Tensor, with_logits: bool = False) -> None:
        """Queues `num_steps` dependent steps from `tokens` at `positions`; both are moved on, nothing is synchronised.

        Writes out_tokens [num_steps, batch] int32 and, if asked, the last step's `logits` [batch, vocab]. Each step
        reads the weights and the caches of all sequences once. The caller sees to it that positions + num_steps stay
        within the capacity.
        """
        assert out_tokens.shape == (num_steps, self.batch) and out_tokens.dtype == torch.int32 and num_steps > 0
        assert out_tokens.is_contiguous() and self._kernel is not None
        params = self.params(out_tokens, num_steps, with_logits)
        self._kernel.launch(self.grid, 32 * (self.layout.warps + 4), params)  # one warpgroup loads
