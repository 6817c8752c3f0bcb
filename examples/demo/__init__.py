"""The demo: a real training job beside simulated GPUs, watched by the real stack (`make demo`)."""
