"""The stage, set once a session, and the stories told on it."""

from collections.abc import Iterator

import pytest

from e2e.stories import stage as stages
from e2e.stories.stage import Stage
from e2e.stories.telling import Telling


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with stages.stage() as made:
        yield made


@pytest.fixture(scope="session")
def telling(stage: Stage, request: pytest.FixtureRequest) -> Telling:
    return Telling(stage, request.session.items)
