"""`rankscope explain`: asks a Prometheus with our rules what holds a run back. Runs anywhere; no part of the hook."""
