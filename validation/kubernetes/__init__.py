"""The chart on a real Kubernetes (`make kubernetes`)."""
