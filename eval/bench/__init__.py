"""Benchmarks: ``python -m eval.bench speed|load|flops|ingest|exact|server|docs``."""
