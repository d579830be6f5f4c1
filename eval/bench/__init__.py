"""Benchmarks: ``python -m eval.bench quality|speed|ingest|exact|docs``."""
