"""REPORT.md and the README's summary, from the JSON that the benchmarks wrote."""
