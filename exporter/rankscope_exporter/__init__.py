"""Rankscope's half on the node: the Prometheus exporter for the GPUs and ranks of one machine."""
