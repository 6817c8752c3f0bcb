"""`rankscope check-node`: whether the GPUs and the node are fit for a job, before it starts."""
