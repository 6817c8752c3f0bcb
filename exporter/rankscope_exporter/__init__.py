"""Prometheus exporter for the GPUs and training ranks of one machine."""
