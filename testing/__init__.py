"""Shared code of the tests, demo, benchmarks and gauntlet."""
