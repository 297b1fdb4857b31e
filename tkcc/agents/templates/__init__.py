"""Pieces of source that candidates are composed of. Text, not code of this package: only a runner executes them."""

from functools import cache
from importlib import resources


@cache
def read(name: str) -> str:
    return (resources.files(__package__) / name).read_text()
