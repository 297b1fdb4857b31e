"""Who does what in the persistent decode step: the layout of a build, weights as units, row groups of each CTA.

All of it is decided on the host, once per model, batch and device. The kernel's own choices at run time (which CTA
attends to which blocks of the cache) are repeated here in Python, for the slow twin.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tkcc.kernels.decode_shape import DecodeShape

UNIT_ROWS, UNIT_COLS = 4, 512  # what one warp multiplies at a time
UNIT_BYTES = 2 * UNIT_ROWS * UNIT_COLS
MAX_SLOTS = 16  # CTAs that one KV head's attention is split over, at most
SMEM_BYTES = 232_448  # most that one CTA may have on compute capability 9.0


@dataclass(frozen=True, slots=True)
class Layout:
    """How one build uses a multiprocessor. The defaults are what measured best, docs/kernels.md."""

    warps: int = 8
    slots: int = 6  # 4 KiB ring slots of each warp
    part_floats: int = 512  # chunk sums of one pass, twice

    def smem_bytes(self, shape: DecodeShape, batch: int) -> int:
        """Bytes of `struct Shared` in cuda/shape.cu, to within its alignment."""
        group = shape.num_heads // shape.num_kv_heads
        padded = -(-max(shape.hidden, shape.attention_width) // UNIT_COLS) * UNIT_COLS
        scratch = (self.warps + 1) * group * (shape.head_dim + 2) * 4
        fixed = 8 * self.part_floats + 2 * batch * padded + scratch + 4 * (group + 2) * shape.head_dim
        fixed += 4 * batch * shape.head_dim + 12 * self.warps * batch + 4 * batch
        fixed += 4 * shape.num_layers * self.warps + 4 * batch + 200 * self.warps + 640
        return fixed + self.warps * self.slots * (UNIT_BYTES + 16)


def fit_layout(shape: DecodeShape, batch: int) -> Layout:
    """The default layout with as many ring slots as shared memory has room for. Raises ValueError if it has for none."""
    widest = max(shape.hidden, shape.attention_width, shape.ffn)
    sums = UNIT_ROWS * _padded_batch(batch)
    part_floats = max(512, -(-widest // UNIT_COLS) * sums)  # at least one row group a pass
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


# --- Row groups of each CTA.


def divide_row_groups(shape: DecodeShape, speeds: Sequence[float]) -> list[list[int]]:
    """How many row groups of QKV, O, gate-up, down and the head each CTA has; they are dealt in CTA order.

    In proportion to `speeds`, how fast each CTA's multiprocessor streams. What is left over of a stage goes where the
    layer has put the least work so far. The same in every layer, so that a warp's part of a stage is a constant.
    """
    grid, total = len(speeds), sum(speeds)
    sizes = stage_sizes(shape)
    kinds = [*sizes[:4], sizes[-1]]
    load = [0.0] * grid  # units so far, over speed
    dealt: list[list[int]] = [[] for _ in kinds]
    for kind in (2, 3, 0, 1, 4):  # the large ones first: the small ones even out what they left
        groups, chunks = kinds[kind]
        counts = [int(groups * speed / total) for speed in speeds]
        done = [(load[i] if kind != 4 else 0.0) + counts[i] * chunks / speeds[i] for i in range(grid)]
        for i in sorted(range(grid), key=done.__getitem__)[: groups - sum(counts)]:
            counts[i] += 1
        assert sum(counts) == groups
        load = [busy + n * chunks / speed for busy, n, speed in zip(load, counts, speeds, strict=True)]
        dealt[kind] = counts
    return dealt


def work_table(dealt: list[list[int]]) -> Tensor:
    """The kernel's form of it: [5][grid] int32, first group | number of groups << 16."""
    rows = []
    for counts in dealt:
        first, row = 0, []
        for count in counts:
            assert first < 1 << 16 and count < 1 << 15, "row groups are counted in 16 bits"
            row.append(first | count << 16)
            first += count
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


# --- The order in which each warp streams its units.


@dataclass(frozen=True, slots=True)
class Runs:
    """Every warp's run of units: where it begins, what it holds, and where each stage's units go."""

    first: Tensor  # [grid, warps] int32: first unit of each run
    parts: Tensor  # [grid, 2 layers, warps] int16: units of QKV; of the rest of the layer (the last also has the head)
    places: list[Tensor]  # for each stage, the place of its units, in the stage's own order


def plan_runs(shape: DecodeShape, dealt: list[list[int]], layout: Layout, batch: int) -> Runs:
    """Lays the units out so that what a warp streams during a step is one contiguous run (`span_of` in cuda/gemv.cu)."""
    grid, warps = len(dealt[0]), layout.warps
    sums = UNIT_ROWS * _padded_batch(batch)
    sizes = stage_sizes(shape)
    counts = np.zeros((len(sizes), grid, warps), dtype=np.int64)
    orders = []  # for each stage: units in the order they are streamed, by CTA, pass and warp; their (CTA, warp)
    for stage, (_, chunks) in enumerate(sizes):
        per_pass = layout.part_floats // (chunks * sums)
        units, owners, first = [], [], 0
        for cta, groups in enumerate(dealt[stage % 4 if stage + 1 < len(sizes) else 4]):
            for done in range(0, groups, per_pass):
                here = min(per_pass, groups - done)
                u = np.arange(here * chunks)
                units.append((first + done + u % here) * chunks + u // here)
                borders = here * chunks * np.arange(warps + 1) // warps
                owners.append(cta * warps + np.repeat(np.arange(warps), np.diff(borders)))
                counts[stage, cta] += np.diff(borders)
            first += groups
        orders.append((np.concatenate(units), np.concatenate(owners)))
    by_run = counts.reshape(len(sizes), -1)
    first_of_run = np.concatenate([[0], by_run.sum(0).cumsum()[:-1]])
    places = []
    for stage, (unit_order, owner_order) in enumerate(orders):
        order = np.argsort(owner_order, kind="stable")
        starts = first_of_run + by_run[:stage].sum(0)
        rank = np.arange(len(order)) - np.repeat(by_run[stage].cumsum() - by_run[stage], by_run[stage])
        place = np.empty(len(order), dtype=np.int64)
        place[unit_order[order]] = starts[owner_order[order]] + rank
        places.append(torch.from_numpy(place))
    layers = counts[:-1].reshape(shape.num_layers, 4, grid, warps)
    parts = np.stack([layers[:, 0], layers[:, 1:].sum(1)], axis=1)  # [layers, 2, grid, warps]
    parts[-1, 1] += counts[-1]
    assert parts.max() < 1 << 15, "units of a run's part are counted in 16 bits"
    parts = parts.reshape(2 * shape.num_layers, grid, warps).transpose(1, 0, 2)
    first_units = torch.from_numpy(first_of_run.reshape(grid, warps)).to(torch.int32)
    return Runs(first_units, torch.from_numpy(parts.astype(np.int16)).contiguous(), places)


def pack_model(shape: DecodeShape, weights: Mapping[str, Tensor], runs: Runs, device: torch.device) -> Tensor:
    """All streamed matrices as units [total, 2048] bf16, in the order of the runs."""
    unit_numel = UNIT_ROWS * UNIT_COLS
    total = sum(groups * chunks for groups, chunks in stage_sizes(shape))
    packed = torch.empty(total, unit_numel, dtype=torch.bfloat16, device=device)
    for place, matrix in zip(runs.places, stage_matrices(shape, weights), strict=True):
        units = packed.new_empty(len(place), unit_numel)
        pack_units(matrix.to(device=device, dtype=torch.bfloat16), units)
        packed[place.to(device)] = units
    return packed


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
        slots = max(1, min(slots, -(-count // min_blocks), MAX_SLOTS))
        splits.append([(count * i // slots, count * (i + 1) // slots) for i in range(slots)])
    return splits
