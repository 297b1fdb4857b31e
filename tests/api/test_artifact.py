"""An artifact's files: what is read from them, and what is refused."""

import pytest

from tests.fakes.manifest import manifest
from tkcc.api.candidate import Candidate, parse_artifact, read_artifact
from tkcc.api.codec import to_json

SOURCE = "def build(spec, weights, cells):\r\n    return '\r é'\n"
PARAMS = {"tile": 4}
MANIFEST = manifest(Candidate(SOURCE, PARAMS).digest, params=PARAMS)
FILES = {"manifest.json": to_json(MANIFEST), "candidate.py": SOURCE, "report.json": "{}"}


def test_a_directory_holds_the_candidate_that_its_manifest_names(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text.encode())
    assert read_artifact(tmp_path) == parse_artifact(FILES) == (MANIFEST, Candidate(SOURCE, PARAMS))


@pytest.mark.parametrize(
    "case, changed, want",
    [
        ("no file", {"manifest.json": None, "candidate.py": None}, "manifest.json, candidate.py is missing"),
        ("no manifest", {"manifest.json": "{}"}, "manifest.json is not a valid Artifact"),
        ("another source", {"candidate.py": "import os\n"}, "the manifest says " + MANIFEST.digest[:16]),
        (
            "other parameters",
            {"manifest.json": FILES["manifest.json"].replace('"tile":4', '"tile":8')},
            "the manifest says " + MANIFEST.digest[:16],
        ),
    ],
)
def test_what_does_not_match_is_refused(case, changed, want):
    with pytest.raises(ValueError, match=want):
        parse_artifact({name: text for name, text in {**FILES, **changed}.items() if text is not None})


def test_a_source_that_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "manifest.json").write_text(FILES["manifest.json"])
    (tmp_path / "candidate.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"candidate\.py is not UTF-8 text"):
        read_artifact(tmp_path)
