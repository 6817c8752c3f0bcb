"""The command `rankscope report`: what a job's GPU time went to over its whole life, and what to do about it."""
