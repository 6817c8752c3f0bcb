"""The command `rankscope hang`: who holds up a run that stands still, by torch's flight recorder or by records."""
