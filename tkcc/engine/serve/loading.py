"""From a model directory (and an artifact) to a forward pass that is ready: every phase of a cold start, timed.

It refuses what does not match before anything is built. Blocking: the server runs it in a thread.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tkcc.engine.artifact import ArtifactError, LoadedArtifact, baseline_digest, check_artifact, load_artifact
from tkcc.engine.host import device_name, keep_freed_memory
from tkcc.engine.serve.cold_start import ColdStart
from tkcc.engine.serve.options import ServeOptions
from tkcc.engine.serve.runner import StepRunner
from tkcc.engine.serve.tokenizer import Tokenizer
from tkcc.engine.tensors import kv_block_bytes, make_kv_cache
from tkcc.models import llama
from tkcc.models.checkpoint import CheckpointError, checkpoint_dtype, load_config, load_weights, model_digest
from tkcc.models.forward import BuildSpec, Cell, ForwardPass, ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP_TOKENS = 64
_DEFAULT_CPU_KV_MIB = 1024
_GPU_KV_RATIO = 0.85  # of what is free once the weights are there: the rest is for activations


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that a server needs of a model."""

    config: ModelConfig
    tokenizer: Tokenizer
    runner: StepRunner
    model_digest: str
    artifact_digest: str  # the baseline's, where no artifact was given
    baseline_digest: str
    device_name: str
    dtype: str


@torch.inference_mode()
def load(options: ServeOptions, cold_start: ColdStart) -> Loaded:
    """Raises CheckpointError or ArtifactError; the message says what to change."""
    with cold_start.phase("config"):
        config = load_config(options.model)
        artifact = None if options.artifact is None else load_artifact(options.artifact)
        dtype_name = _dtype_name(options, artifact)
        device = _device(options.device)
    with cold_start.phase("tokenizer"):
        tokenizer = Tokenizer.load(options.model)
    with cold_start.phase("digest"):
        digest = model_digest(options.model)
        if artifact is not None:
            check_artifact(artifact.manifest, digest, dtype_name)
    with cold_start.phase("weights"):
        weights = load_weights(options.model, device, DTYPES[dtype_name])
    with cold_start.phase("kv_cache"):
        spec = BuildSpec(
            config=config,
            dtype=DTYPES[dtype_name],
            device=device,
            block_tokens=options.block_tokens,
            num_blocks=1,
            num_threads=torch.get_num_threads(),
            params={} if artifact is None else artifact.manifest.params,
        )
        spec = _with_blocks(spec, options)
        kv = make_kv_cache(spec)
        keep_freed_memory()
    with cold_start.phase("build"):
        forward = _build(artifact, options.artifact, spec, weights)
    runner = StepRunner(spec, forward, kv)
    try:
        with cold_start.phase("prepare"):
            forward.prepare(kv)
        with cold_start.phase("warm_up"):
            runner.warm_up(min(WARM_UP_TOKENS, config.max_positions - 1))
    except Exception as err:  # a candidate's code may raise anything
        raise ArtifactError(f"the forward pass fails as it starts: {type(err).__name__}: {err}") from err
    return Loaded(
        config=config,
        tokenizer=tokenizer,
        runner=runner,
        model_digest=digest,
        artifact_digest=baseline_digest() if artifact is None else artifact.manifest.digest,
        baseline_digest=baseline_digest(),
        device_name=device_name(device),
        dtype=dtype_name,
    )


def _dtype_name(options: ServeOptions, artifact: LoadedArtifact | None) -> str:
    if options.dtype != "auto":
        return options.dtype
    if artifact is not None and artifact.manifest.dtype in DTYPES:
        return artifact.manifest.dtype
    return checkpoint_dtype(options.model)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except RuntimeError as err:
        raise CheckpointError(f"--device {text}: {str(err).splitlines()[0]}") from err
    return device


def _with_blocks(spec: BuildSpec, options: ServeOptions) -> BuildSpec:
    """The spec with as many blocks as the KV budget allows, the scratch block besides."""
    block_bytes = kv_block_bytes(spec)
    if options.kv_cache_mib is not None:
        budget_bytes = options.kv_cache_mib << 20
    elif spec.device.type == "cpu":
        budget_bytes = _DEFAULT_CPU_KV_MIB << 20
    else:
        budget_bytes = int(_GPU_KV_RATIO * torch.cuda.mem_get_info(spec.device)[0])
    num_blocks = 1 + budget_bytes // block_bytes
    if num_blocks < 3:
        raise CheckpointError(
            f"--kv-cache-mib {options.kv_cache_mib}: too small, one block takes {block_bytes / 2**20:.1f} MiB"
        )
    return BuildSpec(spec.config, spec.dtype, spec.device, spec.block_tokens, num_blocks, spec.num_threads, spec.params)


def _build(
    artifact: LoadedArtifact | None, path: Path | None, spec: BuildSpec, weights: dict[str, torch.Tensor]
) -> ForwardPass:
    if artifact is None or path is None:
        return llama.build(spec, weights, ())
    try:
        return artifact.build()(spec, weights, _judged_cells(path))
    except ArtifactError:
        raise
    except Exception as err:  # a candidate's code may raise anything
        raise ArtifactError(
            f"artifact {artifact.manifest.digest[:16]} does not build: {type(err).__name__}: {err}"
        ) from err


def _judged_cells(artifact_dir: Path) -> Sequence[Cell]:
    """The slow tier's cells, out of the run's report.json beside it: what it was specialised for then, it is now."""
    try:
        report = json.loads((artifact_dir / "report.json").read_text())
        # By key: another version's report may say more, and what is read here is all that matters.
        return tuple(
            Cell(c["phase"], c["batch"], c["newTokens"], c["contextTokens"], c["weightRatio"])
            for c in report.get("tiers", {}).get("slow", {}).get("cells", ())
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as err:
        raise ArtifactError(f"artifact {artifact_dir}: report.json is not readable ({err!r})") from err
