"""Rankscope's hook for training processes: it records where a rank's time goes.

    import rankscope

    rankscope.instrument()              # or no change at all: RANKSCOPE=1 torchrun … train.py

Optional, for what only the script knows:

    with rankscope.phase("tokenize"):   # a phase of your own; "checkpoint" and "evaluation" are built in
        ...
    rankscope.step()                    # end of a step, in loops without an optimizer; takes samples= and tokens=
    rankscope.log(loss=…)               # loss= and gradient_norm= as numbers, in loops without a known logger
    for batch in rankscope.timed(…):    # data wait and samples, in loops without a DataLoader

None of these raises because of Rankscope. In a process that is not instrumented they cost nothing.
This module imports only the standard library, not torch.
"""

from __future__ import annotations

from rankscope._version import __version__
from rankscope.api import instrument, log, phase, step, timed, uninstrument

__all__ = ["__version__", "instrument", "log", "phase", "step", "timed", "uninstrument"]
