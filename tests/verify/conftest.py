"""A real tier engine on a small random model, shared by the tests of a session: its processes take seconds to start."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify.tiny import TinyTier, start_tiny_tier


@pytest.fixture(scope="session")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyTier]:
    from tkcc.engine.tier import sandbox

    missing = sandbox.missing_features()
    if missing and not os.environ.get("CI"):
        pytest.skip(f"this kernel cannot contain candidates: {missing}")
    scratch: Path = tmp_path_factory.mktemp("tier")
    with start_tiny_tier(scratch) as running:
        yield running
