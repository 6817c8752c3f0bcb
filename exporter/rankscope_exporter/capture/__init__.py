"""Captures: what a node knows about a run that hangs or crashed, written to a folder before its processes are gone."""
