"""Measures gpumesh beside the systems one would use instead: `python -m benchmarks`. See README.md here."""
