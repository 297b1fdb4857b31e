"""Reads a Hugging Face model directory: configuration, weights and the digest that names both.

It decides which architectures are known (the Llama family as tkcc.models.llama runs it) and refuses what that forward
pass would silently get wrong. Tokenizer and chat template are the server's matter.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tkcc.models.forward import ModelConfig

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}

DTYPES = ("float32", "bfloat16", "float16")

# What a checkpoint may say and tkcc.models.llama does not do: wanted value, by key of config.json.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}


class CheckpointError(Exception):
    """The model directory is missing, incomplete, or of a kind that is not known. The message says what to change."""


def load_config(model_dir: Path | str) -> ModelConfig:
    """The configuration in `model_dir`/config.json. Raises CheckpointError."""
    raw = _read_json(Path(model_dir), "config.json")
    architecture = next(iter(raw.get("architectures") or ["(none)"]))
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{model_dir}/config.json: unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}"
        )
    for key, wanted in _REQUIRED.items():
        if raw.get(key, wanted) != wanted:
            raise CheckpointError(f"{model_dir}/config.json: {key}={raw[key]!r} is not supported, only {wanted!r}")
    try:
        return _model_config(raw, qk_norm=ARCHITECTURES[architecture] == "qwen3")
    except KeyError as err:
        raise CheckpointError(f"{model_dir}/config.json: {err.args[0]!r} is missing") from err
    except (TypeError, ValueError) as err:
        raise CheckpointError(f"{model_dir}/config.json: {err}") from err


def checkpoint_dtype(model_dir: Path | str) -> str:
    """The dtype that the checkpoint was made in ("bfloat16", ...), as config.json says; float32 if it is silent."""
    raw = _read_json(Path(model_dir), "config.json")
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise CheckpointError(f"{model_dir}/config.json: dtype {name!r} is not supported, only {', '.join(DTYPES)}")
    return str(name)


def _model_config(raw: Mapping[str, Any], qk_norm: bool) -> ModelConfig:
    num_heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    rope = raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw["rope_theta"]}
    config = ModelConfig(
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope["rope_theta"]),
        max_positions=int(raw["max_position_embeddings"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=qk_norm,
        rope_scaling=_rope_scaling(rope),
    )
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads are no multiple of {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd")
    return config


def _rope_scaling(rope: Mapping[str, Any]) -> Mapping[str, float | str] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", **{key: float(rope[key]) for key in keys}}


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight that a forward pass of `config` needs."""
    d, D, I = config.hidden_size, config.head_dim, config.intermediate_size  # noqa: E741 (one letter a dim)
    q, kv = config.num_heads * D, config.num_kv_heads * D
    yield "model.embed_tokens.weight", (config.vocab_size, d)
    for i in range(config.num_layers):
        layer = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (I, d),
            "mlp.up_proj": (I, d),
            "mlp.down_proj": (d, I),
        }
        if config.qk_norm:
            layer |= {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,)}
        for name, shape in layer.items():
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (d,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, d)


def load_weights(model_dir: Path | str, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight of the model, on `device` in `dtype`, checked against config.json.

    On a CPU and in the file's own dtype the tensors are the mapped file: pages are shared and read on first use.
    Raises CheckpointError.
    """
    model_dir = Path(model_dir)
    wanted = dict(weight_shapes(load_config(model_dir)))
    weights: dict[str, Tensor] = {}
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if name in wanted:
                        weights[name] = file.get_tensor(name).to(device, dtype)
        except (SafetensorError, OSError) as err:
            raise CheckpointError(f"{path}: not a readable safetensors file ({err})") from err
    for name, shape in wanted.items():
        if name not in weights:
            raise CheckpointError(f"{model_dir}: the weight {name} is missing")
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"{model_dir}: {name} is {list(weights[name].shape)}, config.json asks for {list(shape)}"
            )
    return weights


def save_weights(weights: Mapping[str, Tensor], model_dir: Path) -> None:
    """Write `model_dir`/model.safetensors, readable by everybody: servers run under another user than importers."""
    path = model_dir / "model.safetensors"
    save_file(dict(weights), path, metadata={"format": "pt"})
    path.chmod(0o644)


def weight_files(model_dir: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted by name. Raises CheckpointError if there are none."""
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: no such model directory")
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir}: no *.safetensors file in it (for a GGUF file: tkcc model import)")
    return files


def model_digest(model_dir: Path | str) -> str:
    """SHA-256 hex over the parsed configuration and the bytes of the weight files. Raises CheckpointError."""
    model_dir = Path(model_dir)
    digest = hashlib.sha256(json.dumps(asdict(load_config(model_dir)), sort_keys=True).encode())
    for path in weight_files(model_dir):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as err:
            raise CheckpointError(f"{path}: {err.strerror}") from err
    return digest.hexdigest()


def _read_json(model_dir: Path, name: str) -> dict[str, Any]:
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: no such model directory")
    path = model_dir / name
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: not a Hugging Face model directory") from None
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path}: not readable as JSON ({err})") from err
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return raw
