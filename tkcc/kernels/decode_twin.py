"""The persistent step's slow twin: the same schedule in torch, stage by stage, equal to the kernel to the last bit.

It repeats every rounding that the kernel makes, in the kernel's order: a lane's columns, then the lanes, then the
chunks; a warp's blocks, then the warps, then the CTAs. Products of two bf16 are exact in float32, so the kernel's fma
and a product followed by a sum are the same. It reads the decoder's weights, plan and settings, never its results.

Letters: B sequences, R positions of one, K KV heads, G query heads of each, S slots (CTAs) of a head, W warps and one place for the new
position, T tasks (a warp's blocks), D a head's dims.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tkcc.kernels.decode_plan import MAX_SLOTS, UNIT_COLS, UNIT_ROWS, attention_splits, block_positions, stage_sizes
from tkcc.kernels.persistent_decode import PersistentDecode, score_scale, to_float32

NO_SCORE = -3.0e38
_SERIES = ("0x1.430912p-13", "0x1.5d87fep-10", "0x1.3b2ab6p-7", "0x1.c6b08ep-5", "0x1.ebfbep-3", "0x1.62e430p-1")
_LOG2_E = float.fromhex("0x1.715476p+0")


def exp2_exact(x: Tensor) -> Tensor:
    """2 ** x, as cuda/math.cu rounds it."""
    x = x.clamp(-126.0, 126.0)
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    y = torch.full_like(f, float.fromhex(_SERIES[0]))
    for constant in (*(float.fromhex(c) for c in _SERIES[1:]), 1.0):
        y = y * f + constant
    return (y.view(torch.int32) + ((shifted.view(torch.int32) - 0x4B400000) << 23)).view(torch.float32)


def tree_sum(lanes: Tensor) -> Tensor:
    """Sum over the last dim, a power of two, in the order of a butterfly: neighbours first."""
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def ordered_sum(parts: Tensor, dim: int) -> Tensor:
    """Sum over `dim` from first to last."""
    total, *rest = parts.unbind(dim)
    for part in rest:
        total = total + part
    return total


def true_divide(a: Tensor, b: float) -> Tensor:
    """a / b rounded once; torch on a GPU would multiply by 1 / b."""
    return a / torch.full_like(a, b)


def unpack_units(packed: Tensor, groups: int, chunks: int) -> Tensor:
    """A stage's units, [2, 8, groups, chunks, 4, 32]: for each of a lane's 16 columns, contiguous."""
    return packed.view(groups, chunks, UNIT_ROWS, 2, 32, 8).permute(3, 5, 0, 1, 2, 4).contiguous()


def multiply(units: Tensor, x_bk: Tensor) -> Tensor:
    """[B, rows] float32 = x [B, columns] bf16 times the stage's matrix. Needs 128 bytes a row, chunk and sequence."""
    _, _, groups, chunks, _, _ = units.shape
    batch, columns = x_bk.shape
    x = torch.nn.functional.pad(x_bk.float(), (0, chunks * UNIT_COLS - columns)).view(batch, 1, chunks, 1, 2, 32, 8)
    lanes = torch.zeros(batch, *units.shape[2:], dtype=torch.float32, device=units.device)
    for half in range(2):
        for column in range(8):
            lanes.addcmul_(units[half, column].float(), x[..., half, :, column])  # a product of two bf16 is exact
    return ordered_sum(tree_sum(lanes), 2).reshape(batch, groups * UNIT_ROWS)


@dataclass
class StageOutputs:
    """What one step's stages hand to each other, by layer, as the kernel's exchange buffer holds it."""

    qkv: list[Tensor] = field(default_factory=list)  # [B, q|k|v rows] float32
    attention: list[Tensor] = field(default_factory=list)  # [B, H * D] bf16
    mid: list[Tensor] = field(default_factory=list)  # [B, hidden] float32, after o
    hidden: list[Tensor] = field(default_factory=list)  # [B, ffn] bf16
    out: list[Tensor] = field(default_factory=list)  # [B, hidden] float32, after down


@dataclass
class _Run:
    """Positions of one sequence that see equally many blocks of its cache, and how CTAs share these."""

    sequence: int
    positions: list[int]
    split: list[tuple[int, int]]


class DecodeTwin:
    """Runs a decoder's step in torch on the decoder's device, with caches and tokens of its own."""

    def __init__(self, decoder: PersistentDecode) -> None:
        self.decoder, self.shape = decoder, decoder.shape
        self.keys, self.values = decoder.keys.clone(), decoder.values.clone()
        self._units = [
            unpack_units(decoder.packed[place.to(decoder.device)], groups, chunks)
            for place, (groups, chunks) in zip(decoder.runs.places, stage_sizes(self.shape), strict=True)
        ]

    @torch.no_grad()
    def step(self, tokens_b: Tensor, positions: list[int]) -> tuple[Tensor, StageOutputs]:
        """Logits [B, V] float32 and what the stages handed on; appends to its own caches."""
        splits = attention_splits(self.shape, positions, self.decoder.grid, self.decoder.min_blocks)
        runs = [_Run(b, [past], split) for b, (past, split) in enumerate(zip(positions, splits, strict=True))]
        return self._run(tokens_b, runs)

    @torch.no_grad()
    def steps(self, tokens: Tensor, first: int) -> Tensor:
        """Logits [steps, V] of a decoder of one sequence that is fed `tokens` [steps] from position `first` on.

        The same as so many calls of `step`, but positions that see equally many blocks of the cache run together.
        """
        assert self.decoder.batch == 1
        block, logits, done = block_positions(self.shape), [], 0
        while done < len(tokens):
            past = first + done
            count = min(block - (past - 1) % block, len(tokens) - done)
            split = attention_splits(self.shape, [past], self.decoder.grid, self.decoder.min_blocks)[0]
            run = _Run(0, list(range(past, past + count)), split)
            logits.append(self._run(tokens[done : done + count], [run])[0])
            done += count
        return torch.cat(logits)

    def _run(self, tokens_b: Tensor, runs: list["_Run"]) -> tuple[Tensor, StageOutputs]:
        stages, norms = StageOutputs(), self.decoder.norms
        residual = self.decoder.embed[tokens_b.long()].float()
        for layer in range(self.shape.num_layers):
            units = self._units[4 * layer : 4 * layer + 4]
            stages.qkv.append(self._normalised_product(units[0], residual, norms[2 * layer]))
            stages.attention.append(self._attention(stages.qkv[-1], layer, runs))
            residual = residual + multiply(units[1], stages.attention[-1])
            stages.mid.append(residual)
            rows = self._normalised_product(units[2], residual, norms[2 * layer + 1])
            pairs = rows.view(rows.shape[0], -1, 2, 2)  # [B, group, gate or up, 2]
            gate, up = pairs[:, :, 0], pairs[:, :, 1]
            silu = gate / (1.0 + exp2_exact(gate * -_LOG2_E))
            stages.hidden.append((silu * up).bfloat16().flatten(1))
            residual = residual + multiply(units[3], stages.hidden[-1])
            stages.out.append(residual)
        logits = self._normalised_product(self._units[-1], residual, norms[-1])
        return logits[:, : self.shape.vocab], stages

    def _normalised_product(self, units: Tensor, residual_bd: Tensor, norm_d: Tensor) -> Tensor:
        """[B, rows]: the matrix times the RMS norm; the norm's divisor is applied to the product."""
        threads = 32 * self.decoder.layout.warps
        batch, hidden = residual_bd.shape
        rounds = -(-hidden // (threads * 4))
        padded = residual_bd.new_zeros(batch, rounds * threads * 4)
        padded[:, :hidden] = residual_bd
        squares = (padded * padded).view(batch, rounds, threads, 4).transpose(1, 2).reshape(batch, threads, -1)
        total = ordered_sum(tree_sum(ordered_sum(squares, 2).view(batch, -1, 32)), 1)
        rstd = self._rstd(total, hidden)
        return multiply(units, (residual_bd * norm_d.float()).bfloat16()) * rstd[:, None]

    def _rstd(self, squares: Tensor, count: int) -> Tensor:
        mean = true_divide(squares, float(count)) + to_float32(self.shape.eps)
        return torch.ones_like(mean) / mean.double().sqrt().float()  # torch's float32 sqrt on a CPU is 1 ulp off at times

    def _attention(self, qkv: Tensor, layer: int, runs: list["_Run"]) -> Tensor:
        s, d = self.shape, self.decoder
        outs, done = [], 0
        for run in runs:
            rows = qkv[done : done + len(run.positions)].view(len(run.positions), -1, s.head_dim)
            done += len(run.positions)
            q, k, v = rows.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
            if s.qk_norm:
                assert d.qk_norms is not None
                q, k = (self._head_norm(x, d.qk_norms[2 * layer + i]) for i, x in enumerate((q, k)))
            past = torch.tensor(run.positions, device=qkv.device)
            q, k = (self._rotate(x, past).bfloat16() for x in (q, k))
            keys, values = self.keys[layer, run.sequence], self.values[layer, run.sequence]  # [K, positions, D]
            keys[:, past], values[:, past] = k.transpose(0, 1), v.bfloat16().transpose(0, 1)
            # The heads of all positions of the run are but more query heads of their KV head.
            group = s.num_heads // s.num_kv_heads
            q_krgd = q.float().view(len(past), s.num_kv_heads, group, s.head_dim).transpose(0, 1)
            attended = self._attend(q_krgd.flatten(1, 2), keys, values, past.repeat_interleave(group), run.split)
            outs.append(attended.unflatten(1, (len(past), group)).transpose(0, 1).flatten(1))
        return torch.cat(outs)

    def _head_norm(self, x_rhd: Tensor, norm_d: Tensor) -> Tensor:
        squares = (x_rhd * x_rhd).unflatten(-1, (-1, 32))
        rstd = self._rstd(tree_sum(ordered_sum(squares, -2)), x_rhd.shape[-1])
        return x_rhd * rstd[..., None] * norm_d.float()

    def _rotate(self, x_rhd: Tensor, positions_r: Tensor) -> Tensor:
        cosine, sine = self.decoder.rope[positions_r][:, None].chunk(2, dim=-1)
        a, b = x_rhd.chunk(2, dim=-1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)

    def _attend(
        self, q_kgd: Tensor, keys_ktd: Tensor, values_ktd: Tensor, past_g: Tensor, split: list[tuple[int, int]]
    ) -> Tensor:
        """[K, G, D] bf16: softmax over the past and the new position, merged as the CTAs and warps of `split` do."""
        warps = self.decoder.layout.warps
        num_kv, group, dim = q_kgd.shape
        parts_m = q_kgd.new_full((num_kv, group, len(split), warps + 1), NO_SCORE)
        parts_l = torch.zeros_like(parts_m)
        parts_o = q_kgd.new_zeros(num_kv, group, len(split), warps + 1, dim)
        there = torch.zeros(len(split), warps + 1, dtype=torch.bool)
        tasks = []  # (slot, warp, first block, blocks)
        for slot, (first, last) in enumerate(split):
            count = last - first
            for w in range(warps):
                begin, end = first + count * w // warps, first + count * (w + 1) // warps
                if begin < end:
                    tasks.append((slot, w, begin, end - begin))
                    there[slot, w] = True
        if tasks:
            m, l, o = self._attend_tasks(q_kgd, keys_ktd, values_ktd, past_g, tasks)
            slots, in_slot = [t[0] for t in tasks], [t[1] for t in tasks]
            parts_m[:, :, slots, in_slot], parts_l[:, :, slots, in_slot], parts_o[:, :, slots, in_slot] = m, l, o
        lanes = (q_kgd * keys_ktd[:, past_g].float()).view(num_kv, group, -1, 32)
        parts_m[:, :, -1, warps] = tree_sum(ordered_sum(lanes, 2)) * score_scale(self.shape)
        parts_l[:, :, -1, warps] = 1.0
        parts_o[:, :, -1, warps] = values_ktd[:, past_g].float()
        there[-1, warps] = True

        m = parts_m.amax(3)
        weights = exp2_exact(parts_m - m[..., None])
        l, o = torch.zeros_like(m), torch.zeros_like(parts_o[:, :, :, 0])
        for w in range(warps + 1):
            here = there[:, w].to(m.device)
            l = torch.where(here, l + parts_l[..., w] * weights[..., w], l)
            o = torch.where(here[:, None], o + parts_o[..., w, :] * weights[..., w, None], o)
        attended = (o / l[..., None]).bfloat16().float()  # [K, G, S, D]: what each CTA publishes, with m and l
        weights = exp2_exact(m - m.amax(2, keepdim=True)) * l
        sharing = dim // 8  # lanes that share a head where these are merged; each weighs several slots
        padded = torch.nn.functional.pad(weights, (0, MAX_SLOTS - len(split))).unflatten(-1, (-1, sharing))
        weights = weights / tree_sum(ordered_sum(padded, 2))[..., None]
        return ordered_sum(attended * weights[..., None], 2).bfloat16()

    def _attend_tasks(
        self, q_kgd: Tensor, keys_ktd: Tensor, values_ktd: Tensor, past_g: Tensor, tasks: list[tuple[int, int, int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each warp's online softmax: m, l [K, G, T] and o [K, G, T, D]."""
        num_kv, group, dim = q_kgd.shape
        block, device = block_positions(self.shape), q_kgd.device
        lanes, per_pass = dim // 8, 256 // dim
        q = q_kgd.view(num_kv, group, 1, 1, 1, lanes, 8)
        m = q_kgd.new_full((num_kv, group, len(tasks)), NO_SCORE)
        l_lanes = q_kgd.new_zeros(num_kv, group, len(tasks), block)
        o_lanes = q_kgd.new_zeros(num_kv, group, len(tasks), per_pass, dim)
        for turn in range(max(count for _, _, _, count in tasks)):
            active = torch.tensor([turn < count for _, _, _, count in tasks], device=device)
            first = torch.tensor([(begin + min(turn, count - 1)) * block for _, _, begin, count in tasks], device=device)
            index = first[:, None] + torch.arange(block, device=device)  # [T, block]
            live = (index < past_g[:, None, None]) & active[:, None]  # [G, T, block]
            keys = keys_ktd[:, index].float().view(num_kv, 1, len(tasks), 8, per_pass, lanes, 8)
            dots = torch.zeros_like(keys[..., 0]).expand(-1, group, -1, -1, -1, -1)
            for e in range(8):
                dots = dots + keys[..., e] * q[..., e]
            scores = (tree_sum(dots) * score_scale(self.shape)).flatten(3)  # [K, G, T, block]
            scores = torch.where(live, scores, NO_SCORE)
            top = torch.maximum(scores.amax(3), m)
            shrink = torch.where(top > m, exp2_exact(m - top), 1.0)
            m, l_lanes, o_lanes = top, l_lanes * shrink[..., None], o_lanes * shrink[..., None, None]
            p = torch.where(live, exp2_exact(scores - m[..., None]).bfloat16().float(), 0.0)
            l_lanes = l_lanes + p
            written = (index < past_g.max()) & active[:, None]  # beyond may be NaNs
            values = torch.where(written[..., None], values_ktd[:, index].float(), 0.0)  # [K, T, block, D]
            values = values.view(num_kv, 1, len(tasks), 8, per_pass, dim)
            p = p.view(num_kv, group, len(tasks), 8, per_pass, 1)
            for turn_in_block in range(8):
                o_lanes = o_lanes + p[:, :, :, turn_in_block] * values[:, :, :, turn_in_block]
        return m, tree_sum(l_lanes), tree_sum(o_lanes.transpose(3, 4))
