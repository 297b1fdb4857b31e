"""Writes a small random model directory that a Hugging Face loader reads: for tests and trials, no download.

Weights are scaled so that activations stay near one and the logits spread: greedy text is no tie, and a fault in any
part of a forward pass shows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tkcc.models.checkpoint import load_config, save_weights, weight_shapes

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What the tokenizer's merges are learnt from: enough English for words to become tokens.
_CORPUS = """The quick brown fox jumps over the lazy dog while the engine answers one question after another.
A request has a prompt, and a prompt has tokens; what was computed for a prefix is kept in blocks and used again.
When traffic moves, the forward pass that was best yesterday may not be the best one today, so measure it, then decide.
What is the capital of France? What time is it? Write a short story about a river, a bridge and the people on it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a random model."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None  # None: hidden / heads
    intermediate: int = 176
    vocab: int = 512
    max_positions: int = 2048
    tied: bool = True
    qk_norm: bool = False  # a Qwen3 instead of a Llama


def write_random_model(out_dir: Path, shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `out_dir` (made if missing).

    Raises CheckpointError for sizes that do not fit together.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(shape.vocab)
    _write_json(out_dir / "config.json", _config_json(shape, dtype))
    config = load_config(out_dir)
    save_weights(random_weights(dict(weight_shapes(config)), seed, dtype), out_dir)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2})
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[2],
            "model_max_length": shape.max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices that keep the variance of their input (rows of unit expected norm), norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5).to(dtype)
    return weights


def _config_json(shape: Shape, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim or shape.hidden // shape.heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens: specials, 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return tokenizer


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
