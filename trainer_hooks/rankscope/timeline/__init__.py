"""Accounting of a rank's time: phases, steps, waits, groups, checkpoints, and the device's clock."""
