"""What can be refused without running anything. Triage only: containment and the judge are the defence."""

import ast

from tkcc.api.candidate import Candidate

MAX_SOURCE_BYTES = 900_000  # as for artifacts: a ConfigMap holds 1 MiB in all
MAX_PARAMS = 64
MAX_PARAM_CHARS = 4096


def refusal(candidate: Candidate) -> str:
    """Why this cannot be a candidate; empty if it can."""
    num_bytes = len(candidate.source.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        return f"the source has {num_bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed"
    if len(candidate.params) > MAX_PARAMS:
        return f"{len(candidate.params)} parameters, at most {MAX_PARAMS} are allowed"
    for name, value in candidate.params.items():
        if len(str(value)) > MAX_PARAM_CHARS:
            return f"parameter {name!r} is longer than {MAX_PARAM_CHARS} characters"
    try:
        tree = ast.parse(candidate.source)
    except (SyntaxError, ValueError) as err:
        line = f" (line {err.lineno})" if isinstance(err, SyntaxError) and err.lineno else ""
        return f"not Python: {err.args[0]}{line}"
    except (RecursionError, MemoryError):
        return "not Python that can be parsed: nested too deeply"
    if not _binds(tree, "build"):
        return "the module defines no function `build(spec, weights, cells)`"
    return ""


def wants_compiler(candidate: Candidate) -> bool:
    """Will it use torch's compiler? A guess: a wrong one costs time, nothing else."""
    return "torch.compile" in candidate.source and candidate.params.get("compile") is not False


def _binds(tree: ast.Module, name: str) -> bool:
    """Does the module's top level define, assign or import `name`?"""
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                if node.name == name:
                    return True
            case ast.Assign():
                if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                    return True
            case ast.ImportFrom() | ast.Import():
                if any((alias.asname or alias.name) == name for alias in node.names):
                    return True
    return False
