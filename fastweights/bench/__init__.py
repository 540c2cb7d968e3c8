"""Benchmarks: contestants take turns, must agree with the exact memory, and only then are timed and reported."""
