"""Text to tokens and back: the model's tokenizer, text that appears token by token, and stop strings."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from tkcc.models.checkpoint import CheckpointError

_INCOMPLETE = "\ufffd"  # what a decoder makes of the first bytes of a character


class Tokenizer:
    """A model directory's tokenizer.json and the special tokens that its other files name."""

    def __init__(
        self,
        hf: HFTokenizer,
        eos_ids: frozenset[int],
        bos_id: int | None,
        chat_template: str | None,
        special: tuple[str, str] = ("", ""),
    ) -> None:
        self.hf = hf
        self.eos_ids = eos_ids  # any of them ends a generation
        self._bos_id = bos_id  # put before a text prompt that the tokenizer gives none; None: the model wants none
        self.chat_template = chat_template
        self.bos_token, self.eos_token = special  # as chat templates name them

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Raises CheckpointError."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the server needs a tokenizer")
        try:
            hf = HFTokenizer.from_file(str(path))
        except Exception as err:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer ({err})") from err
        settings = _read_json(model_dir / "tokenizer_config.json")
        template = settings.get("chat_template")
        template_file = model_dir / "chat_template.jinja"
        if template_file.is_file():
            template = template_file.read_text()
        if isinstance(template, list):  # several named ones
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        bos, eos = (_token_text(settings.get(key)) or "" for key in ("bos_token", "eos_token"))
        bos_id = hf.token_to_id(bos) if bos and settings.get("add_bos_token") else None
        return cls(hf, _eos_ids(model_dir, hf, settings), bos_id, template, (bos, eos))

    @property
    def vocab_size(self) -> int:
        return self.hf.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised, as chat templates need."""
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self.hf.decode(list(ids), skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """One token as text that names no other; "bytes:\\x.." where it is not valid UTF-8, as OpenAI writes it."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_bytes(self, token: int) -> bytes:
        text = self.hf.id_to_token(token)
        if text is None:  # a padded vocabulary has ids without a token
            return b""
        if token in self._added_ids:
            return str(text).encode()
        try:
            return bytes(self._byte_of[char] for char in text)
        except KeyError:  # not a byte-level vocabulary
            return str(self.hf.decode([token], skip_special_tokens=False)).encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.hf.get_added_tokens_decoder())

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Byte-level BPE writes each byte as one printable character: itself where it is one, else 256 and up."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TextStream:
    """Text out of tokens, one at a time: holds back bytes that are no whole character yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # A window keeps the work per token constant; text depends on neighbours, so it starts one emission earlier.
        self._start = self._read = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text

    def flush(self) -> str:
        """What is held back, at the end."""
        text = self._pending()
        self._start = self._read = len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._ids[self._start : self._read])
        return self._tokenizer.decode(self._ids[self._start :])[len(known) :]


class StopStrings:
    """Lets text through up to the first stop string; holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.is_hit = False

    def push(self, text: str) -> str:
        """Text that is safe to show; nothing more once a stop string was met."""
        if self.is_hit or not self._stops:
            return "" if self.is_hit else text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_hit = True
            return self._take(min(found))
        keep = max(self._overlap(stop) for stop in self._stops)
        return self._take(len(self._held) - keep)

    def flush(self) -> str:
        return "" if self.is_hit else self._take(len(self._held))

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def _eos_ids(model_dir: Path, hf: HFTokenizer, settings: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(model_dir / name).get("eos_token_id")
        found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    text = _token_text(settings.get("eos_token"))
    token = hf.token_to_id(text) if text else None
    return frozenset(found if token is None else found | {token})


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as err:
        raise CheckpointError(f"{path}: not readable as JSON ({err})") from err
    return data if isinstance(data, dict) else {}
