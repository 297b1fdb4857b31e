"""The cache: keys that differ when what they stand for does, and entries that are whole or not there."""

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.cluster import cache


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_a_key_tells_lists_of_parts_apart(one, other):
    assert (cache.digest(*one) == cache.digest(*other)) == (one == other)


def test_a_key_of_files_is_of_names_modes_and_bytes(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("x")
    second.write_text("y")
    before = cache.digest_files(tmp_path, [first, second])
    assert before == cache.digest_files(tmp_path, [second, first])

    first.chmod(0o755)
    executable = cache.digest_files(tmp_path, [first, second])
    first.write_text("z")
    changed = cache.digest_files(tmp_path, [first, second])
    second.rename(tmp_path / "c")
    renamed = cache.digest_files(tmp_path, [first, tmp_path / "c"])
    assert len({before, executable, changed, renamed}) == 4


def test_an_entry_that_failed_is_not_there_and_is_made_the_next_time(tmp_path):
    path = tmp_path / "entry"

    def fail(target: Path) -> None:
        (target / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.entry(path, fail)
    assert not path.exists()
    cache.entry(path, lambda target: (target / "whole").touch())
    assert [found.name for found in path.iterdir()] == ["whole"]


def _make_slowly(path: Path, log: Path) -> None:
    def make(target: Path) -> None:
        with log.open("a") as out:
            out.write("made\n")
        (target / "whole").touch()

    cache.entry(path, make)


def test_two_builders_make_an_entry_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    builders = [spawn.Process(target=_make_slowly, args=(tmp_path / "entry", tmp_path / "log")) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(30)
        assert builder.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"
