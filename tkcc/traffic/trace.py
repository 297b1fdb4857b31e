"""Request traces: what a file says about traffic, without text. Reads JSON lines and Parquet, refuses bad files by
name.

JSON lines take the keys of the Mooncake traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`) and
an optional `session`; a first line `{"trace": {"block_tokens": N, ...}}` says how long a prefix block is. Parquet
takes the columns `ts_s`, `prompt_tokens`, `output_tokens`, `hash_ids`, `session` and needs the extra `traffic`.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAX_TOKENS = 100_000_000  # above it a length is taken for a broken file


class TraceError(ValueError):
    """A trace file cannot be used; the message names the file, the place and what is expected there."""


@dataclass(frozen=True)
class TraceRequest:
    arrival_s: float  # since the trace's first request
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()  # of the prompt's prefix blocks in order; a last, partial block may have one too
    session: int = -1  # -1: the trace does not tell


@dataclass(frozen=True)
class Trace:
    """Requests by arrival. Two requests share the longest common prefix of their block ids."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int  # tokens of one prefix block; 0: the trace has no block ids
    about: Mapping[str, str] = field(default_factory=dict)  # source, licence and the like, where the file tells

    @property
    def span_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def mean_prompt_tokens(self) -> float:
        return self.num_prompt_tokens / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        return sum(request.output_tokens for request in self.requests) / len(self.requests)


def read(path: Path, block_tokens: int | None = None) -> Trace:
    """Read a `.jsonl`, `.jsonl.gz` or `.parquet` file. `block_tokens` overrides what the file says. Raises
    TraceError."""
    if path.is_dir():
        raise TraceError(f"{path} is a directory: name one trace file")
    if not path.exists():
        raise TraceError(f"{path}: no such file")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        about, rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        about, rows = {}, _read_parquet(path)
    else:
        raise TraceError(f"{path}: unknown kind of trace: use .jsonl, .jsonl.gz or .parquet")
    return _assemble(path, about, rows, block_tokens)


def write_jsonl(trace: Trace, path: Path) -> None:
    """Write in the form that `read` takes, gzipped if the name ends in .gz; equal traces give equal bytes."""
    head: dict[str, Any] = {"block_tokens": trace.block_tokens, **trace.about}
    lines = [json.dumps({"trace": head})]
    for request in trace.requests:
        row: dict[str, Any] = {
            "timestamp": round(request.arrival_s * 1e3),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
        }
        if request.block_ids:
            row["hash_ids"] = request.block_ids
        if request.session >= 0:
            row["session"] = request.session
        lines.append(json.dumps(row, separators=(",", ":")))
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0) if path.suffix == ".gz" else data)


def _assemble(path: Path, about: dict[str, Any], rows: Iterable[TraceRequest], block_tokens: int | None) -> Trace:
    requests = sorted(rows, key=lambda request: request.arrival_s)  # stable: ties keep the file's order
    if not requests:
        raise TraceError(f"{path}: the trace has no requests")
    size = block_tokens if block_tokens is not None else about.pop("block_tokens", 0)
    about.pop("block_tokens", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise TraceError(f"{path}: block_tokens is {size!r}: expected a whole number of tokens")
    if size == 0 and any(request.block_ids for request in requests):
        raise TraceError(
            f"{path}: requests have block ids but the file does not say how long a block is: --block-tokens N"
        )
    first = requests[0].arrival_s
    shifted = tuple(
        TraceRequest(r.arrival_s - first, r.prompt_tokens, r.output_tokens, r.block_ids, r.session) for r in requests
    )
    return Trace(shifted, size, {key: str(value) for key, value in about.items()})


def _read_jsonl(path: Path) -> tuple[dict[str, Any], list[TraceRequest]]:
    about: dict[str, Any] = {}
    rows: list[TraceRequest] = []
    for number, line in _lines(path):
        place = f"{path} line {number}"
        try:
            row = json.loads(line)
        except ValueError as err:
            raise TraceError(f"{place}: not JSON: {err}") from err
        if not isinstance(row, dict):
            raise TraceError(f"{place}: expected an object, found {type(row).__name__}")
        if "trace" in row and number == 1:
            if not isinstance(row["trace"], dict):
                raise TraceError(f'{place}: "trace" must be an object such as {{"block_tokens": 512}}')
            about = dict(row["trace"])
            continue
        for key in ("timestamp", "input_length", "output_length"):
            if key not in row:
                raise TraceError(f"{place}: {key} is missing")
        rows.append(
            _request(
                place,
                _number(place, "timestamp", row["timestamp"]) / 1e3,
                row["input_length"],
                row["output_length"],
                row.get("hash_ids", []),
                row.get("session", -1),
            )
        )
    return about, rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as err:
        raise TraceError(f"{path}: cannot be read: {err}") from err


def _read_parquet(path: Path) -> list[TraceRequest]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as err:
        raise TraceError(f"{path}: Parquet needs pyarrow: pip install 'tkcc[traffic]'") from err
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as err:
        raise TraceError(f"{path}: not a Parquet file: {err}") from err
    missing = [name for name in ("ts_s", "prompt_tokens", "output_tokens") if name not in table.column_names]
    if missing:
        raise TraceError(f"{path}: no column {', '.join(missing)}; the file has {', '.join(table.column_names)}")
    columns = [table.column(name).to_pylist() for name in ("ts_s", "prompt_tokens", "output_tokens")]
    for name, default in (("hash_ids", []), ("session", -1)):
        columns.append(table.column(name).to_pylist() if name in table.column_names else [default] * table.num_rows)
    rows = []
    for number, (ts_s, prompt, output, ids, session) in enumerate(zip(*columns, strict=True), start=1):
        place = f"{path} row {number}"
        rows.append(_request(place, _number(place, "ts_s", ts_s), prompt, output, ids or [], session))
    return rows


def _request(place: str, arrival_s: float, prompt: Any, output: Any, ids: Any, session: Any) -> TraceRequest:
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise TraceError(f"{place}: hash_ids must be a list of whole numbers")
    return TraceRequest(
        arrival_s,
        _count(place, "prompt tokens", prompt, 1),
        _count(place, "output tokens", output, 0),
        tuple(ids),
        _count(place, "session", session, -1),
    )


def _number(place: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TraceError(f"{place}: {name} is {value!r}: expected a number")
    return float(value)


def _count(place: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_TOKENS:
        raise TraceError(f"{place}: {name} is {value!r}: expected a whole number of at least {least}")
    return value
