"""The pure core: drift, canary verdicts and `reconcile`; no I/O, no clock, no randomness.

`reconcile(spec, status, seen)` is for one InferenceDeployment, `reconcile_run(spec, status, seen)` for one
RecompilationRun. Both are level-based: they look at the world as it is and say what to make true.
"""
