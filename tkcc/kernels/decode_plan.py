"""Who does what in the persistent decode step: the layout of a build, weights as units, row groups of each CTA.

All of it is decided on the host, once per model, batch and device. The kernel's own choices at run time (which CTA
attends to which blocks of the cache) are repeated here in Python, for the slow twin.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tkcc.kernels.decode_shape import DecodeShape

UNIT_ROWS, UNIT_COLS = 4, 512  # what one warp multiplies at a time
UNIT_BYTES = 2 * UNIT_ROWS * UNIT_COLS
SMEM_BYTES = 232_448  # most that one CTA may have on compute capability 9.0


@dataclass(frozen=True, slots=True)
class Layout:
    """How one build uses a multiprocessor. The defaults are what measured best, docs/kernels.md."""

    warps: int = 8
    slots: int = 6  # 4 KiB ring slots of each warp
    part_floats: int = 1024  # chunk sums of one pass, twice
    balance: Literal["stream", "stage"] = "stream"

    def smem_bytes(self, shape: DecodeShape, batch: int) -> int:
        """Bytes of `struct Shared` in cuda/shape.cu, to within its alignment."""
        group = shape.num_heads // shape.num_kv_heads
        padded = -(-shape.hidden // UNIT_COLS) * UNIT_COLS
        scratch = (self.warps + 1) * group * (shape.head_dim + 2) * 4
        fixed = 8 * self.part_floats + 2 * batch * padded + scratch + 2 * (group + 2) * shape.head_dim
        fixed += 4 * batch * shape.head_dim + 4 * (4 * shape.num_layers + 1) + 8 * self.warps * batch + 512
        return fixed + self.warps * self.slots * (UNIT_BYTES + 8)


def fit_layout(shape: DecodeShape, batch: int) -> Layout:
    """The default layout with as many ring slots as shared memory has room for. Raises ValueError if it has for none."""
    widest = max(shape.hidden, shape.attention_width, shape.ffn)
    sums = UNIT_ROWS * _padded_batch(batch)
    part_floats = max(1024, -(-widest // UNIT_COLS) * sums)  # at least one row group a pass
    for slots in range(12, 1, -1):
        layout = Layout(slots=slots, part_floats=part_floats)
        if layout.smem_bytes(shape, batch) <= SMEM_BYTES:
            return layout
    raise ValueError(f"batch {batch} of this shape leaves no shared memory for the weight ring; use a smaller batch")


def _padded_batch(batch: int) -> int:
    assert 1 <= batch <= 8, batch
    return 1 << (batch - 1).bit_length()


# --- Weights as units.


def pack_units(weight: Tensor, out: Tensor) -> None:
    """Copies weight [R, C] into `out`, flat units: [R / 4][C / 512][4][512], columns padded with zeros.

    R must be a multiple of 4. Moves 4 * R * C bytes.
    """
    rows, cols = weight.shape
    assert rows % UNIT_ROWS == 0, rows
    chunks = -(-cols // UNIT_COLS)
    units = out.view(rows // UNIT_ROWS, chunks, UNIT_ROWS, UNIT_COLS)
    for chunk in range(chunks):
        part = weight[:, chunk * UNIT_COLS : (chunk + 1) * UNIT_COLS]
        width = part.shape[1]
        units[:, chunk, :, :width] = part.reshape(-1, UNIT_ROWS, width)
        units[:, chunk, :, width:] = 0


def stage_matrices(shape: DecodeShape, weights: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The matrices in the order the step streams them: q|k|v, o, gate and up in pairs of rows, down; then the head."""
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        qkv = [weights[f"{prefix}self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
        yield torch.cat(qkv)
        yield weights[f"{prefix}self_attn.o_proj.weight"]
        gate, up = weights[f"{prefix}mlp.gate_proj.weight"], weights[f"{prefix}mlp.up_proj.weight"]
        pairs = (m.reshape(shape.ffn // 2, 1, 2, shape.hidden) for m in (gate, up))
        yield torch.cat(list(pairs), dim=1).reshape(2 * shape.ffn, shape.hidden)
        yield weights[f"{prefix}mlp.down_proj.weight"]
    head = weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    missing = -shape.vocab % UNIT_ROWS
    yield torch.cat([head, head.new_zeros(missing, shape.hidden)]) if missing else head


def stage_sizes(shape: DecodeShape) -> list[tuple[int, int]]:
    """(row groups, 512-column chunks) of each streamed matrix, in order."""
    d, a, f = (-(-width // UNIT_COLS) for width in (shape.hidden, shape.attention_width, shape.ffn))
    layer = [(shape.qkv_rows // 4, d), (shape.hidden // 4, a), (shape.ffn // 2, d), (shape.hidden // 4, f)]
    return layer * shape.num_layers + [(-(-shape.vocab // 4), d)]


def pack_model(shape: DecodeShape, weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """All streamed matrices as units, flat bf16."""
    sizes = stage_sizes(shape)
    total = sum(groups * chunks for groups, chunks in sizes) * UNIT_ROWS * UNIT_COLS
    packed = torch.empty(total, dtype=torch.bfloat16, device=device)
    at = 0
    for (groups, chunks), matrix in zip(sizes, stage_matrices(shape, weights), strict=True):
        numel = groups * chunks * UNIT_ROWS * UNIT_COLS
        pack_units(matrix.to(device=device, dtype=torch.bfloat16), packed[at : at + numel])
        at += numel
    return packed


# --- Row groups of each CTA.


def divide_row_groups(shape: DecodeShape, grid: int, balance: Literal["stream", "stage"]) -> list[list[int]]:
    """For each stage, how many of its row groups each CTA has; they are dealt in CTA order.

    "stage" deals each stage as evenly as it goes. "stream" evens out the bytes that a CTA has streamed by the end of
    each stage, which matters more while loads run ahead of the stages.
    """
    streamed = [0.0] * grid
    dealt = []
    for groups, chunks in stage_sizes(shape):
        even = groups / grid
        if balance == "stage":
            counts = [groups * (i + 1) // grid - groups * i // grid for i in range(grid)]
        else:
            mean = sum(streamed) / grid
            want = [max(0.0, even + (mean - done) / chunks) for done in streamed]
            want = [w * groups / sum(want) for w in want]
            counts = [int(w) for w in want]
            by_rest = sorted(range(grid), key=lambda i: counts[i] - want[i])  # the largest fraction first
            for i in by_rest[: groups - sum(counts)]:
                counts[i] += 1
        assert sum(counts) == groups
        streamed = [done + n * chunks for done, n in zip(streamed, counts, strict=True)]
        dealt.append(counts)
    return dealt


def work_table(dealt: list[list[int]]) -> Tensor:
    """The kernel's form of it: [stages][grid] int32, first group | number of groups << 16."""
    rows = []
    for counts in dealt:
        first, row = 0, []
        for count in counts:
            assert first < 1 << 16 and count < 1 << 15, "row groups are counted in 16 bits"
            row.append(first | count << 16)
            first += count
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


# --- Attention at run time (`attention_role` in cuda/stream.cu).


def block_positions(shape: DecodeShape) -> int:
    """Positions in one 4 KiB unit of keys or values."""
    return UNIT_BYTES // 2 // shape.head_dim


def attention_splits(shape: DecodeShape, positions: list[int], grid: int, min_blocks: int) -> list[list[tuple[int, int]]]:
    """For each sequence, the block ranges that the CTAs of any one of its KV heads take, in slot order."""
    blocks = [-(-past // block_positions(shape)) for past in positions]
    total = shape.num_kv_heads * sum(blocks)
    splits = []
    for count in blocks:
        slots = 1 + (count * (grid - len(positions) * shape.num_kv_heads) // total if total else 0)
        slots = max(1, min(slots, -(-count // min_blocks)))
        splits.append([(count * i // slots, count * (i + 1) // slots) for i in range(slots)])
    return splits
