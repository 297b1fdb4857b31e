"""Images: tags that follow their inputs, no torch where none belongs, and which old ones stay."""

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.cluster import images, store

ROOT = Path(__file__).parents[2]
PARTS = ("operator", "worker", "engine")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with something in every place that an image takes from."""
    for source in {f"images/{name}.Dockerfile" for name in PARTS} | {s for part in PARTS for s in images.SOURCES[part]}:
        path = tmp_path / source if "." in source else tmp_path / source / "code.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.setattr(images, "REPOSITORY", tmp_path)
    return tmp_path


def _tags(repository: Path, **arguments: str) -> dict[str, str]:
    contexts = repository.parent / "contexts"
    shutil.rmtree(contexts, ignore_errors=True)
    return {name: images._plan(name, contexts / name, arguments).reference for name in PARTS}


@pytest.mark.parametrize(
    "changed, of",
    [
        ("tkcc/code.py", {"operator", "worker", "engine"}),
        ("operator/code.py", {"operator"}),
        ("requirements/agents.txt", {"worker"}),
        ("requirements/operator.txt", {"operator", "worker"}),
        ("images/engine.Dockerfile", {"engine"}),
        ("README.md", set()),
        ("tkcc/__pycache__/code.pyc", set()),
    ],
)
def test_a_change_gives_new_tags_to_the_images_that_take_it(repository, changed, of):
    before = _tags(repository)
    (repository / changed).parent.mkdir(exist_ok=True)
    (repository / changed).write_text("changed")
    after = _tags(repository)
    assert {name for name in PARTS if before[name] != after[name]} == of


def test_where_torch_comes_from_is_part_of_the_tag(repository):
    assert _tags(repository, TORCH="pip")["engine"] != _tags(repository, TORCH="mounted")["engine"]


@pytest.mark.parametrize("image", ["operator", "worker"])
def test_operator_and_worker_install_no_torch(image):
    locks = [ROOT / source for source in images.SOURCES[image] if source.startswith("requirements/")]
    names = {line.split("==")[0] for lock in locks for line in lock.read_text().splitlines()}
    assert "pydantic" in names
    assert not {"torch", "triton", "numpy", "transformers"} & names


def test_a_mounted_torch_leaves_out_torch_and_keeps_what_the_engine_imports():
    dockerfile = (ROOT / "images" / "engine.Dockerfile").read_text()
    found = re.search(r"mounted\) without='(.*?)'", dockerfile)
    assert found
    lock = (ROOT / "requirements" / "engine.txt").read_text().splitlines()
    kept = {line.split("==")[0] for line in lock if not re.search(found[1], line)}
    assert not {"torch", "triton"} & kept
    assert not any(name.startswith("nvidia-") for name in kept)
    assert {"numpy", "safetensors", "tokenizers", "gguf", "jinja2", "aiohttp", "pydantic"} <= kept


def test_images_copy_only_what_is_staged_for_them():
    for name in PARTS:
        text = (ROOT / "images" / f"{name}.Dockerfile").read_text()
        assert tuple(re.findall(r"^COPY (\S+) ", text, re.MULTILINE)) == images.SOURCES[name]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), unique=True), st.integers(1, 3))
def test_the_newest_of_each_repository_stay(pairs, keep):
    references = [f"localhost/{name}:{tag}" for name, tag in pairs]
    kept = store.newest(references, keep)
    assert kept == [reference for reference in references if reference in kept]
    for name in "ab":
        of_name = [reference for reference in references if f"/{name}:" in reference]
        assert [reference for reference in kept if f"/{name}:" in reference] == of_name[-keep:]
