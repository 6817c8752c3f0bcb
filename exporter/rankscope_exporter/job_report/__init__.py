"""The command `rankscope report`: where a job's GPU time went over its whole life, and what to do about it."""
