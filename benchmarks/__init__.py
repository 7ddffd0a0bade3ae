"""Benchmarks, run from the checkout: ``python -m benchmarks.hot_path`` and ``.overhead``."""
