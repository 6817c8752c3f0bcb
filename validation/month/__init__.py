"""A month in an hour: healthy and faulty runs as series over simulated weeks, judged by the real rules.

Data flows one way: a run's properties (plan) → its ranks' steps (steps) → an exporter's values (record) → Prometheus'
samples (samples) → the stretches in which an alert is possible (quiet) → the alerts of the rules (engine) → figures
(report).
"""
