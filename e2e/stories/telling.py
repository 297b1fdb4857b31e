"""Stories told side by side: each module's chapters run in order in a thread of their own, its tests wait for them.

Most of a story is waiting: for pods, windows, drains. Told one after the other the stories would take three times as
long. A chapter builds on those before it: when one fails, the rest of its module is not told. Modules of a later act
begin when all of the acts before have ended.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

import pytest

from e2e.stories.stage import Stage

SIDE_BY_SIDE = 4  # stories at once: a run of one has some 2 GB in tiers and serving pods

S = TypeVar("S")  # what a story's chapters are about


class BrokenOffError(Exception):
    """A chapter before this one failed."""


@dataclass
class Chapter(Generic[S]):
    tell: Callable[[S], None]
    told: "Future[None]" = field(default_factory=Future)
    took_s: float | None = None

    @property
    def title(self) -> str:
        return self.tell.__name__.removeprefix("test_").replace("_", " ")


class Story(Generic[S]):
    """Of one module: `@story.given` makes the scene, each `@story.chapter` is a test that is handed it."""

    def __init__(self, act: int = 1) -> None:
        self.act = act
        self.chapters: list[Chapter[S]] = []
        self._given: Callable[[Stage], S] | None = None

    def given(self, make: Callable[[Stage], S]) -> Callable[[Stage], S]:
        self._given = make
        return make

    def chapter(self, tell: Callable[[S], None]) -> Callable[["Telling"], None]:
        chapter = Chapter(tell)
        self.chapters.append(chapter)

        def test(telling: "Telling") -> None:
            telling.wait(self, chapter)

        test.__name__, test.__doc__ = tell.__name__, tell.__doc__
        test.part_of = (self, chapter)  # type: ignore[attr-defined]
        return test

    def tell(self, stage: Stage, wanted: set[int]) -> None:
        """The wanted chapters, by id, and those that they build on."""
        last = max(i for i, chapter in enumerate(self.chapters) if id(chapter) in wanted)
        chapters = self.chapters[: last + 1]
        try:
            assert self._given is not None, "a story without @story.given"
            scene = self._given(stage)
        except BaseException as err:
            chapters[0].told.set_exception(err)
            _break_off(chapters[1:], "the story broke off at its beginning")
            return
        for i, chapter in enumerate(chapters):
            started_s = time.monotonic()
            try:
                chapter.tell(scene)
            except BaseException as err:
                chapter.told.set_exception(err)
                _break_off(chapters[i + 1 :], f"the story broke off at: {chapter.title}")
                return
            finally:
                chapter.took_s = time.monotonic() - started_s
            chapter.told.set_result(None)


def _break_off(chapters: Iterable[Chapter[Any]], why: str) -> None:
    for chapter in chapters:
        chapter.told.set_exception(BrokenOffError(why))


class Telling:
    """All stories of a session that a test was selected from."""

    def __init__(self, stage: Stage, items: Iterable[pytest.Item]) -> None:
        self._wanted: dict[int, tuple[Story[Any], set[int]]] = {}
        for item in items:
            part_of = getattr(getattr(item, "function", None), "part_of", None)
            if part_of:
                story, chapter = part_of
                self._wanted.setdefault(id(story), (story, set()))[1].add(id(chapter))
        self._stage = stage
        # Daemons: an interrupted session ends, and the cluster with it, whatever a story still waits for.
        Thread(target=self._tell_all, name="stories", daemon=True).start()

    @property
    def stories(self) -> list[Story[Any]]:
        return [story for story, _ in self._wanted.values()]

    def wait(self, story: Story[Any], chapter: Chapter[Any]) -> None:
        try:
            chapter.told.result()
        except BrokenOffError as err:
            pytest.fail(str(err), pytrace=False)

    def _tell_all(self) -> None:
        for act in sorted({story.act for story in self.stories}):
            slots = Semaphore(SIDE_BY_SIDE)
            threads = [
                Thread(target=self._tell, args=(story, wanted, slots), daemon=True)
                for story, wanted in self._wanted.values()
                if story.act == act
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _tell(self, story: Story[Any], wanted: set[int], slots: Semaphore) -> None:
        with slots:
            story.tell(self._stage, wanted)
