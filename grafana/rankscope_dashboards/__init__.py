"""Rankscope's Grafana dashboards as typed Python; `grafana/generate.py` writes them to `grafana/dashboards/`.

`fleet.py`, `cost.py`, `run.py` and `node.py` define the panels with their queries, units and descriptions; `panels.py`
and `tables.py` define how each kind of panel looks. Uses the Foundation SDK's models, not its builders: plain values
are shorter.
"""

import warnings

with warnings.catch_warnings():
    # The SDK warns when its classic schema is imported. Every Grafana since 10 reads that schema; the new one needs a
    # recent Grafana. Imported here first, so that no other module causes the warning.
    warnings.simplefilter("ignore", DeprecationWarning)
    import grafana_foundation_sdk.models.dashboard as _  # noqa: F401 - imported to suppress the warning
