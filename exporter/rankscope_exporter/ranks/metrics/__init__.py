"""The metrics of a rank, one file for each subject."""
