"""`make gpu-check`: the exporter on a real GPU, beside `nvidia-smi -q -x` and under a known load, and the hook there.

Needs a GPU and its driver, torch for the load and the hook, and no network. What each part shows:
docs/measurements/README.md.
"""
