"""The command `rankscope hang`: find the rank that blocks a run, from torch's flight recorder or from rank records."""
