"""`rankscope top`: what is wrong on this node, in a terminal, from records and NVML alone."""
