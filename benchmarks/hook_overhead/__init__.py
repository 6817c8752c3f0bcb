"""What the hook costs a training step, beside its peers: `python -m benchmarks.hook_overhead`."""
