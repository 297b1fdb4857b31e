"""Kubernetes objects as pure functions of (object, spec, settings): equal inputs give equal JSON, so that applying it
again changes nothing."""
