"""A simulated month of healthy and faulty runs, judged by the exporter's diagnosis: false alarms, and what is found.

Data flows one way: a run's properties (plan) → the run with the right finding (scene) → sums of its steps (series) →
its ranks' readings (run) → verdicts (feed) → figures (local).
"""
