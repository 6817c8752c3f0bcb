"""The commands: `rankscope run`, `rankscope stacks` and `rankscope explain`. Nothing here is imported in training."""
