"""The `tkcc` command: help that is quick and complete, and errors that are one line."""

import subprocess
import sys

import pytest

from tkcc.cli.main import commands, main, make_parser

RECOMPILE = ["recompile", "--model", "{tmp}", "--trace", "{tmp}/trace.jsonl", "--out", "{tmp}/out"]
FOR_MACHINES = {"worker"}  # started by a Job


def test_every_command_explains_itself_with_an_example(capsys):
    for words, command in commands().items():
        if words in FOR_MACHINES:
            continue
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([*words.split(), "--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and command.SUMMARY and f"tkcc {words}" in text, words
        assert "examples:\n" in text, words


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from tkcc.cli.main import make_parser; make_parser().format_help();"
        "print([name for name in ('torch', 'aiohttp', 'kopf', 'kubernetes', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "argv, want",
    [
        (["model", "init", "--out", "{tmp}/m", "--layers", "0"], "--layers must be at least 1"),
        (["model", "init", "--out", "{tmp}/m", "--vocab", "100"], "--vocab must be at least 259"),
        (["model", "init", "--out", "{tmp}/m", "--heads", "3", "--kv-heads", "2"], "3 heads are no multiple"),
        (["model", "init", "--out", "{tmp}"], "exists and is not empty"),
        ([*RECOMPILE, "--max-candidates", "0"], "--max-candidates must be at least 1"),
        ([*RECOMPILE, "--min-gain", "1.5"], "--min-gain must be a share"),
        (RECOMPILE, "not a Hugging Face model directory"),
        (["model", "import", "no-such-model"], "no model known by that name (smollm2-135m-instruct)"),
        (["model", "import", "{tmp}/file"], "--out DIR is needed"),
        (["model", "import", "{tmp}/file", "--out", "{tmp}/m"], "not a readable GGUF file"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(argv, want, tmp_path, capsys):
    (tmp_path / "file").write_text("no model")
    assert main([arg.format(tmp=tmp_path) for arg in argv]) == 2
    printed = capsys.readouterr()
    assert want in printed.err and len(printed.err.strip().splitlines()) == 1 and printed.out == ""
    assert not (tmp_path / "out").exists()


def test_a_random_model_is_written_and_named(tmp_path, capsys):
    assert main(["model", "init", "--out", str(tmp_path / "m"), "--layers", "1", "--untied"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "m").iterdir()}
