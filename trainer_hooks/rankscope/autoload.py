"""Start without a code change: torch calls `autoload` inside `import torch` (entry point group `torch.backends`).

It runs in every process that imports torch, including launchers and loader workers. An exception would make
`import torch` fail, so it does nothing unless RANKSCOPE is set, and never raises. PYTHONPATH may bring the package to a
Python that pip would not install it for, so everything imported here works with Python 3.8.
"""

from __future__ import annotations

import logging

from rankscope.process.switches import is_on


def autoload() -> None:
    """Instrument this process if RANKSCOPE is set."""
    if not is_on("RANKSCOPE"):
        return
    try:
        from rankscope.attach import instrument

        instrument()
    except Exception as error:
        logging.getLogger("rankscope").warning("rankscope: not watching this process: %s", error)
