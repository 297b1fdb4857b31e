"""How border types become bytes and back: one configuration, canonical JSON, and SHA-256 digests over it.

It decides the wire form (camelCase keys, no unknown fields, sorted keys, no spaces), so that a digest made in one
process is the digest made in every other. Errors of parsing are `ValueError`s that name the field.
"""

import hashlib
import json
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

T = TypeVar("T")

BORDER = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", ser_json_inf_nan="strings")


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}  # making one costs milliseconds; functools.cache confuses mypy here


def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    adapter = _ADAPTERS.get(cls)
    if adapter is None:
        adapter = _ADAPTERS[cls] = TypeAdapter(cls)
    return adapter


def to_dict(value: object) -> dict[str, Any]:
    """The JSON-ready mapping of a border type; fields that are None are left out."""
    out = _adapter(type(value)).dump_python(value, mode="json", by_alias=True, exclude_none=True)
    assert isinstance(out, dict), type(value)
    return out


def to_json(value: object) -> str:
    """Canonical JSON: sorted keys, no spaces, no None fields. Equal values give equal text."""
    return canonical_json(to_dict(value))


def canonical_json(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def from_dict(cls: type[T], data: Any) -> T:
    """Parse a mapping. Raises ValueError that names each bad field and what was expected there."""
    try:
        value: T = _adapter(cls).validate_python(data)
        return value
    except ValidationError as err:
        raise ValueError(f"not a valid {cls.__name__}: {_problems(err)}") from err


def from_json(cls: type[T], text: str | bytes) -> T:
    """Parse JSON text. Raises ValueError that names each bad field and what was expected there."""
    try:
        value: T = _adapter(cls).validate_json(text)
        return value
    except ValidationError as err:
        raise ValueError(f"not a valid {cls.__name__}: {_problems(err)}") from err


def _problems(err: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in e['loc']) or '(whole)'}: {e['msg']}"
        for e in err.errors(include_url=False)[:5]
    )


def sha256_hex(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()
