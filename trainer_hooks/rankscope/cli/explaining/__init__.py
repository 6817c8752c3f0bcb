"""`rankscope explain`: asks a Prometheus with Rankscope's rules what slows down a run. Not part of the hook."""
