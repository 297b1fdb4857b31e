"""Traces, workload windows, replay, and the map from each engine's metric names to ours. No torch, no cluster."""
