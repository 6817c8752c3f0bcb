"""Where a rank's time goes: phases, steps, waits, groups, checkpoints, and the clock of its device."""
