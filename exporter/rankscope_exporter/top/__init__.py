"""`rankscope top`: show the problems of this node in a terminal, from records and NVML."""
