"""Rankscope's half inside the training process: where every second of a rank goes.

    import rankscope

    rankscope.instrument()              # or no change at all: RANKSCOPE=1 torchrun … train.py

Optional, for what cannot be seen from outside the script:

    with rankscope.phase("tokenize"):   # time of your own kind; "checkpoint" and "evaluation" are known
        ...
    rankscope.step()                    # the end of a step, in loops without an optimizer; takes samples= and tokens=
    for batch in rankscope.timed(…):    # data wait and samples, in loops without a DataLoader

None of these ever raises because of Rankscope, and all of them are free when the process is not instrumented.
Importing this module brings in neither torch nor anything that is not in the standard library.
"""

from __future__ import annotations

from rankscope._version import __version__
from rankscope.api import instrument, phase, step, timed, uninstrument

__all__ = ["__version__", "instrument", "phase", "step", "timed", "uninstrument"]
