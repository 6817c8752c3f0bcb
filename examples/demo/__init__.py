"""The demo: a real training job with simulated GPUs, monitored by the real stack (`make demo`)."""
