"""Measure what `cag` claims."""
