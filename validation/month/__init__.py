"""A month in an hour: healthy and faulty runs as series over simulated weeks, judged by the real rules.

Data flows one way: what a run is (plan) → what its ranks do (steps) → what exporters show (record) → what a Prometheus
that scrapes them has (samples) → which stretches may tell of anything (quiet) → what the rules tell of them (engine) →
figures (report).
"""
