"""The training process as a whole: its identity, its forks, its end, and the stacks of its threads."""
