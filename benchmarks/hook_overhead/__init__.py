"""The cost of the hook in a training step, compared with other libraries: `python -m benchmarks.hook_overhead`."""
