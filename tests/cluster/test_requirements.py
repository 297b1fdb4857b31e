"""What each image installs: read from pyproject.toml, and no torch where none belongs."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("images_requirements", ROOT / "images" / "requirements.py")
assert _spec and _spec.loader
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def _arguments(image: str) -> tuple[list[str], list[str]]:
    """The extras and the exclusions that an image's Dockerfile asks for."""
    text = (ROOT / "images" / f"{image}.Dockerfile").read_text()
    found = re.search(r"requirements\.py /pyproject\.toml (\S+)(?: --without ([a-z,]+))?", text)
    assert found, image
    return found[1].split(","), (found[2] or "").split(",")


def _names(lines: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in lines}


@pytest.mark.parametrize("image, needs", [("operator", {"kopf", "kubernetes"}), ("worker", {"openai", "kubernetes"})])
def test_operator_and_worker_have_what_they_need_and_no_torch(image, needs):
    names = _names(_module.requirements(PYPROJECT, *_arguments(image)))
    assert needs <= names
    assert not {"torch", "triton", "transformers"} & names
    assert "kopf" not in names or image == "operator"


def test_a_mounted_torch_is_left_out_and_a_pip_one_is_not():
    mounted = _names(_module.requirements(PYPROJECT, ["engine"], ["torch", "triton"]))
    whole = _names(_module.requirements(PYPROJECT, ["engine"], []))
    assert whole - mounted == {"torch", "triton"}


def test_an_unknown_extra_is_named():
    with pytest.raises(ValueError, match="no extra enginee"):
        _module.requirements(PYPROJECT, ["enginee"], [])
