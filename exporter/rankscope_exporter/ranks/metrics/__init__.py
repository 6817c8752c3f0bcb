"""The metrics of a rank, a file each for what they are about."""
