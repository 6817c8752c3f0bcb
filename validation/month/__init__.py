"""Simulated months of healthy and faulty runs: false alarms, and what is found of each fault.

`__main__` judges them by the rules. Data flows one way: a run's properties (plan) → its ranks' steps (steps) → an
exporter's values (record) → Prometheus' samples (samples) → the stretches in which an alert is possible (quiet) → the
alerts of the rules (engine) → figures (report).

`local` judges them by the exporter's diagnosis: a run with the right finding (scene) → sums of its steps (series) → the
readings of its ranks (run) → verdicts (feed) → figures (local).
"""
