"""Settings: one file, an environment over it, and words for what is wrong."""

from pathlib import Path

import pytest

from tkcc.shell.settings import load

IMAGES = "images: {engine: e, worker: w}\n"


def test_the_file_over_the_defaults_and_the_environment_over_the_file(tmp_path: Path):
    path = tmp_path / "settings.yaml"
    path.write_text(IMAGES + "tickS: 5\ndrain: {acceptS: 1}\n")
    settings = load({"TKCC_SETTINGS": str(path), "TKCC_TICK_S": "2", "TKCC_IDENTITY": "pod-1", "HOME": "/x"})
    assert (settings.tick_s, settings.drain.accept_s, settings.drain.finish_s) == (2.0, 1, 120)
    assert (settings.identity, settings.images.worker) == ("pod-1", "w")


@pytest.mark.parametrize(
    "text, want",
    [
        ("images: {engine: e}\n", r"images\.worker: Field required"),
        (IMAGES + "tick: 5\n", r"tick: Unexpected keyword"),
        (IMAGES + "tickS: soon\n", r"tickS: Input should be a valid number"),
        (IMAGES + "torchHostPath: relative/path\n", r"torchHostPath: String should match"),
        (IMAGES + "rolling: {maxSurge: 0, maxUnavailable: 0}\n", r"must not both be 0"),
        ("- a list\n", r"expected a mapping of settings, got list"),
        ("images: {engine: [}\n", r"settings\.yaml: while parsing"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, text: str, want: str):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=want) as raised:
        load({"TKCC_SETTINGS": str(path)})
    assert str(path) in str(raised.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match="No such file"):
        load({"TKCC_SETTINGS": str(tmp_path / "nothing.yaml")})
