"""Turns a GGUF file of a Llama model into a Hugging Face model directory: weights dequantised, tokenizer rebuilt.

It decides how GGUF's names, layouts and tokenizer kinds map to Hugging Face's, and refuses what it does not know
rather than guessing. Where the file comes from is tkcc.models.catalogue's matter.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tkcc.models.checkpoint import CheckpointError, save_weights

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IGNORED = {"rope_freqs.weight"}  # RoPE follows from the configuration

# The split before BPE, by GGUF's tokenizer.ggml.pre.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def import_gguf(path: Path, out_dir: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `out_dir` (made; must not hold a model yet): config.json, model.safetensors, tokenizer.json, ...

    Raises CheckpointError when the file is unreadable or of a kind that is not known.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as err:
        raise CheckpointError(f"{path}: not a readable GGUF file ({err})") from err
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise CheckpointError(f"{path}: architecture {meta.get('general.architecture')!r}, only 'llama' is known")
    out_dir.mkdir(parents=True, exist_ok=True)
    weights = _read_weights(reader, meta, dtype)
    config = _config(meta, tie="lm_head.weight" not in weights, dtype=dtype)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    save_weights(weights, out_dir)
    _tokenizer(meta).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(meta))


def _read_weights(reader: gguf.GGUFReader, meta: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name in _IGNORED:
            continue
        array = dequantize(tensor.data, tensor.tensor_type)  # [out, in]: GGUF's shape, reversed
        if ".attn_q." in tensor.name:
            array = _unpermute(array, int(meta["llama.attention.head_count"]))
        elif ".attn_k." in tensor.name:
            array = _unpermute(array, int(meta["llama.attention.head_count_kv"]))
        weights[_weight_name(tensor.name)] = torch.from_numpy(np.array(array)).to(dtype)
    return weights


def _unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps a RoPE pair in neighbouring rows, Hugging Face half a head apart."""
    out, width = array.shape
    pairs = array.reshape(num_heads, out // num_heads // 2, 2, width)
    return np.asarray(pairs.swapaxes(1, 2).reshape(out, width))


def _weight_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise CheckpointError(f"the GGUF file holds a weight that is not known: {name}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _config(meta: dict[str, Any], tie: bool, dtype: torch.dtype) -> dict[str, Any]:
    if scaling := meta.get("llama.rope.scaling.type"):
        raise CheckpointError(f"the GGUF file asks for RoPE scaling {scaling!r}: not supported")
    heads, hidden = int(meta["llama.attention.head_count"]), int(meta["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": int(meta["llama.block_count"]),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(meta.get("llama.attention.key_length", hidden // heads)),
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        # GGUF stores float32: 1e-5 comes back as 9.99999974e-06
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(meta.get("llama.rope.freq_base", 10_000.0)),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "tie_word_embeddings": tie,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE `Tokenizer` equal to the one the GGUF file describes."""
    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(f"tokenizer {meta.get('tokenizer.ggml.model')!r} is not supported, only byte-level BPE")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(meta.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind == "smollm":  # each digit a token, then GPT-2's split
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if kind in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    raise CheckpointError(f"pre-tokenizer {kind!r} is not known; known: smollm, llama-bpe, gpt-2")


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[int(token_id)]
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
