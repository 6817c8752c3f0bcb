"""The diagnosis: what a training run loses its time to, which rank causes it, and why.

    readings → facts → detectors → persistence → priority → findings

Readings are cumulative counters and the current state of each rank at one moment. Two readings make facts: rates over
the window between them. Detectors are pure functions from facts to candidates. Persistence decides which candidates
have lasted long enough, priority removes those that another one explains, and what remains are the findings.

The package uses the standard library only. It does no I/O and has no clock of its own: the caller passes readings and
their times. docs/diagnosis.md describes each detector.
"""
