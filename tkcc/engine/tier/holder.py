"""The holder: loads the checkpoint once, into memory that no process can write again, and stays.

On a CPU the weights are a sealed memory file, which lives as long as any process has it. Norm weights are a small file
of their own: the judge replaces them for its weight-perturbation challenge.
"""

import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from tkcc.api.codec import to_dict
from tkcc.engine.artifact import baseline
from tkcc.engine.tier import arena, channel, sandbox, tensors
from tkcc.engine.tier.arena import Layout
from tkcc.models.checkpoint import CheckpointError, load_config, load_weights, model_digest
from tkcc.models.forward import ModelConfig


def tier_config(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The model cut to its first layers (0: all). Raises CheckpointError."""
    if num_layers > config.num_layers:
        raise CheckpointError(f"the model has {config.num_layers} layers, {num_layers} are asked for")
    return replace(config, num_layers=num_layers or config.num_layers)


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def layer_of(name: str) -> int:
    """The layer a weight belongs to; -1 for embedding, last norm and head."""
    parts = name.split(".")
    return int(parts[2]) if len(parts) > 2 and parts[1] == "layers" else -1


def write_sealed(name: str, weights: Sequence[tuple[str, Tensor]]) -> tuple[int, Layout]:
    """A memory file with these tensors, unwritable from now on."""
    layout = arena.lay_out((key, tensors.dtype_name(w.dtype), tuple(w.shape)) for key, w in weights)
    fd = arena.create(name, layout.num_bytes)
    memory = arena.map_file(fd, writable=True)
    places = tensors.views(memory, layout)
    for key, w in weights:
        places[key].copy_(w)
    places.clear()
    del places
    memory.close()  # the seal needs that no writable map is left
    arena.seal(fd)
    return fd, layout


def main(channel_fd: int, model_dir: str, num_layers: int, dtype: str) -> int:
    sandbox.hide_memory()
    directory = Path(model_dir)
    with socket.socket(fileno=channel_fd) as sock:
        try:
            full = load_config(directory)
            config = tier_config(full, num_layers)
            loaded = load_weights(directory, torch.device("cpu"), tensors.DTYPES[dtype])
            wanted = {k: w for k, w in loaded.items() if layer_of(k) < config.num_layers}
            weights_fd, weights = write_sealed("tkcc-weights", [(k, w) for k, w in wanted.items() if not is_norm(k)])
            norms_fd, norms = write_sealed("tkcc-norms", [(k, w) for k, w in wanted.items() if is_norm(k)])
            digest = model_digest(directory)
        except CheckpointError as err:
            channel.send(sock, {"op": "failed", "reason": str(err)})
            return 1
        del loaded, wanted
        body = {
            "op": "weights",
            "config": asdict(config),
            "full_layers": full.num_layers,
            "weights": weights.to_dict(),
            "norms": norms.to_dict(),
            "model_digest": digest,
            "baseline": to_dict(baseline()),
        }
        channel.send(sock, body, [weights_fd, norms_fd])
        try:
            channel.receive(sock)  # until the supervisor ends
        except channel.ChannelClosedError:
            return 0
    return 0
