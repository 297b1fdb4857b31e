"""Reading traces: what a good file means, and how a bad one is refused."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tkcc.traffic.trace import Trace, TraceError, TraceRequest, read, write_jsonl

SHIPPED = Path(__file__).parents[2] / "examples" / "traces"
ROW = {"timestamp": 1500, "input_length": 700, "output_length": 30, "hash_ids": [4, 9]}


def _file(folder: Path, *lines: object, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_mooncake_lines_are_read_by_arrival_and_start_at_zero(tmp_path):
    path = _file(tmp_path, ROW, {**ROW, "timestamp": 500, "hash_ids": [4]}, "", {**ROW, "timestamp": 900, "session": 3})
    trace = read(path, block_tokens=512)
    assert trace.requests == (
        TraceRequest(0.0, 700, 30, (4,)),
        TraceRequest(0.4, 700, 30, (4, 9), session=3),
        TraceRequest(1.0, 700, 30, (4, 9)),
    )
    assert (trace.block_tokens, trace.span_s, trace.mean_prompt_tokens, trace.mean_output_tokens) == (512, 1.0, 700, 30)


def test_parquet_holds_the_same(tmp_path):
    table = pa.table(
        {"ts_s": [1.5, 0.5], "prompt_tokens": [700, 70], "output_tokens": [30, 3], "hash_ids": [[4, 9], None]}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet", 512) == Trace(
        (TraceRequest(0.0, 70, 3), TraceRequest(1.0, 700, 30, (4, 9))), 512
    )


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_written_reads_back(tmp_path, name):
    trace = Trace((TraceRequest(0.0, 5, 1), TraceRequest(2.25, 900, 7, (1, 2), 4)), 64, {"licence": "Apache-2.0"})
    write_jsonl(trace, tmp_path / name)
    once = (tmp_path / name).read_bytes()
    assert read(tmp_path / name) == trace
    write_jsonl(trace, tmp_path / name)
    assert (tmp_path / name).read_bytes() == once  # no time stamp in the archive


@pytest.mark.parametrize(
    "case, lines, message",
    [
        ("no request", [], "has no requests"),
        ("broken JSON", ["{"], "line 1: not JSON"),
        ("a bare number", [ROW, "7"], "line 2: expected an object, found int"),
        ("a missing key", [{"timestamp": 0, "input_length": 3}], "line 1: output_length is missing"),
        (
            "a negative length",
            [{**ROW, "output_length": -3}],
            "output tokens is -3: expected a whole number of at least 0",
        ),
        ("a fraction of a token", [{**ROW, "input_length": 1.5}], "prompt tokens is 1.5"),
        ("an empty prompt", [{**ROW, "input_length": 0}], "prompt tokens is 0: expected a whole number of at least 1"),
        ("a length as text", [{**ROW, "input_length": "12"}], "prompt tokens is '12'"),
        ("a time as text", [{**ROW, "timestamp": "noon"}], "timestamp is 'noon': expected a number"),
        ("a time that is no number", ['{"timestamp": NaN, "input_length": 1, "output_length": 1}'], "timestamp is nan"),
        ("ids that are no list", [{**ROW, "hash_ids": 4}], "hash_ids must be a list"),
        ("ids without a block size", [ROW], "does not say how long a block is: --block-tokens"),
        ("a block size as text", [{"trace": {"block_tokens": "512"}}, ROW], "block_tokens is '512'"),
        ("a head that is no object", [{"trace": 5}, ROW], '"trace" must be an object'),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, case, lines, message):
    path = _file(tmp_path, *lines)
    with pytest.raises(TraceError) as refused:
        read(path)
    assert message in str(refused.value) and str(path) in str(refused.value)


def test_files_that_are_not_what_their_name_says(tmp_path):
    for name, content in (
        ("a.jsonl.gz", b"plain"),
        ("b.jsonl", b"\xff\xfe\x00"),
        ("c.parquet", b"nothing"),
        ("d.txt", b""),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(TraceError, match=name):
            read(path)
    whole = gzip.compress(json.dumps(ROW).encode() * 100)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz: cannot be read"):
        read(tmp_path / "cut.jsonl.gz")
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="is a directory"):
        read(tmp_path)


def test_parquet_without_the_columns_names_them(tmp_path):
    pq.write_table(pa.table({"ts_s": [0.0], "tokens": [1]}), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="no column prompt_tokens, output_tokens; the file has ts_s, tokens"):
        read(tmp_path / "t.parquet")


@pytest.mark.parametrize("name, licence", [("chat", "Apache-2.0"), ("coding-agent", "Apache-2.0")])
def test_shipped_traces_are_small_and_say_where_they_come_from(name, licence):
    path = SHIPPED / f"{name}.jsonl.gz"
    trace = read(path)
    assert trace.about["licence"] == licence and trace.about["source"] and trace.about["cut"]
    assert path.stat().st_size < 100_000
    assert (SHIPPED / "LICENSES" / f"{licence}.txt").exists()
