"""`rankscope explain`: asks a Prometheus what slows down a run. Not part of the hook."""
