"""Scalar field types of the custom resources, and the two schema extensions that their fields carry.

A field type decides three things at once: what Python holds, what the JSON looks like, and what the CRD schema says.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

_DURATION = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?")
_DURATION_PATTERN = "^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,7}s)?$"


def parse_duration(text: object) -> timedelta:
    """`1h30m`, `15m`, `2s`. Raises ValueError that says what a duration looks like."""
    if isinstance(text, timedelta):
        return text
    match = _DURATION.fullmatch(text) if isinstance(text, str) and text else None
    if match is None:
        raise ValueError(f"{text!r} is no duration: write hours, minutes and seconds like 1h30m, 15m or 2s")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return timedelta(hours=hours, minutes=minutes, seconds=seconds)


def format_duration(value: timedelta) -> str:
    """The shortest form that parse_duration reads back. Durations are whole seconds."""
    total_s = int(value.total_seconds())
    hours, minutes, seconds = total_s // 3600, total_s // 60 % 60, total_s % 60
    parts = ((hours, "h"), (minutes, "m"), (seconds, "s"))
    return "".join(f"{amount}{unit}" for amount, unit in parts if amount) or "0s"


def _whole_utc_second(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs its zone")
    return value.astimezone(UTC).replace(microsecond=0)


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "minLength": 2, "maxLength": 20, "pattern": _DURATION_PATTERN}),
]

# Whole seconds, like the API server's own times: what was written equals what is read back.
Timestamp = Annotated[
    datetime,
    AfterValidator(_whole_utc_second),
    PlainSerializer(lambda value: value.strftime("%Y-%m-%dT%H:%M:%SZ"), return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]

# A resource quantity of Kubernetes (500m, 2Gi, 1), which the API server would refuse only when the pod is made.
_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_QUANTITY = rf"^\+?{_NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
Quantity = Annotated[
    int | str, WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": _QUANTITY, "maxLength": 32})
]

# The name of an artifact: the SHA-256 of its source and parameters, or `baseline` for the built-in forward pass.
BASELINE = "baseline"
ArtifactRef = Annotated[str, Field(pattern="^(baseline|[0-9a-f]{64})$")]
ArtifactChoice = Annotated[str, Field(pattern="^(|baseline|[0-9a-f]{64})$")]  # empty: none

# Bounded strings: the API server wants a bound on all that a rule or a list key looks at.
Str63 = Annotated[str, Field(max_length=63)]  # names of Kubernetes objects, tokens
Str64 = Annotated[str, Field(max_length=64)]  # digests and reasons
Count = Annotated[int, Field(ge=0)]


def cel(*rules: tuple[str, str]) -> dict[str, Any]:
    """Schema extension: (CEL rule, message that says what to change) pairs, checked by the API server."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def list_map(*keys: str) -> dict[str, Any]:
    """Schema extension: a list whose items are known by these keys, so that server-side apply merges by item."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC_LIST: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
