"""A GGUF file made here from a known model comes back as that model."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tkcc.models.checkpoint import CheckpointError, load_config
from tkcc.models.gguf_import import import_gguf
from tkcc.models.random_model import Shape, write_random_model

# Rows of a multiple of 32, as GGUF's quantised blocks want.
SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=320)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    write_random_model(directory, SHAPE, seed=5)
    return directory


def gguf_name(name):
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(source, path, pre="gpt-2", architecture="llama", quantise=None, extra_tensor=None):
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    config = load_config(source)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in load_file(source / "model.safetensors").items():
        array = tensor.numpy()
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads:  # neighbouring rows are a RoPE pair in GGUF
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if quantise and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(np.ascontiguousarray(array), quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_configuration_and_tokenizer_come_back(source, tmp_path):
    write_gguf(source, tmp_path / "m.gguf")
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", torch.float32)
    assert load_config(tmp_path / "out") == load_config(source)
    want, got = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    tokenizers = [Tokenizer.from_file(str(d / "tokenizer.json")) for d in (source, tmp_path / "out")]
    text = "<|im_start|>user\nWhat  is 12345 in naïve Größe? <|im_end|>"
    ids, again = (tokenizer.encode(text).ids for tokenizer in tokenizers)
    assert ids == again and tokenizers[1].decode(again, skip_special_tokens=False) == text
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_quantised_weights_are_near(source, tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(source, tmp_path / "m.gguf", quantise=kind)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", torch.float32)
    want, got = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in want:
        scale = want[name].abs().max()
        assert (want[name] - got[name]).abs().max() <= scale / 127, name


def test_the_digits_of_a_smollm_tokenizer_stand_alone(source, tmp_path):
    write_gguf(source, tmp_path / "m.gguf", pre="smollm")
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    encoded = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("in 1999, then")
    assert "Ġ 1 9 9 9 ," in " ".join(encoded.tokens)


@pytest.mark.parametrize(
    "case, options, want",
    [
        ("another architecture", {"architecture": "gpt2"}, "architecture 'gpt2', only 'llama' is known"),
        ("a split that is not known", {"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' is not known"),
        (
            "a weight that is not known",
            {"extra_tensor": "blk.0.attn_q_norm.weight"},
            "not known: blk.0.attn_q_norm.weight",
        ),
    ],
)
def test_what_is_not_known_is_refused(case, options, want, source, tmp_path):
    write_gguf(source, tmp_path / "m.gguf", **options)
    with pytest.raises(CheckpointError, match=want):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"hello, this is no model" * 10])
def test_a_file_that_is_none_is_refused(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
