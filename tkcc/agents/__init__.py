"""Proposes candidate forward passes; never judges, and never sees torch: candidates are text."""
