"""Rankscope's Grafana dashboards as typed Python; `grafana/generate.py` writes them to `grafana/dashboards/`.

A panel states its queries, its unit and what it tells (`run.py`, `node.py`); how panels of a kind look is said once,
in `panels.py` and `tables.py`. Built on the Foundation SDK's models and not on its builders: plain values are shorter.
"""

import warnings

with warnings.catch_warnings():
    # The SDK warns when its classic schema is imported. We stay with that: every Grafana since 10 reads it, while
    # the second one has to be new. Imported here, before any module of ours does.
    warnings.simplefilter("ignore", DeprecationWarning)
    import grafana_foundation_sdk.models.dashboard as _  # noqa: F401 - imported for the warning's sake
