"""The zero-code start: torch calls `autoload` inside `import torch` (entry point group `torch.backends`).

It runs in every process that imports torch, launchers and loader workers among them, and an exception here would
make `import torch` raise. So it does nothing unless RANKSCOPE says so, and swallows everything. PYTHONPATH may bring
the package to a Python that pip would not install it for: what is imported here has to work with Python 3.8.
"""

from __future__ import annotations

import logging

from rankscope.process.switches import is_on


def autoload() -> None:
    """Instrument this process if the environment asks for it."""
    if not is_on("RANKSCOPE"):
        return
    try:
        from rankscope.attach import instrument

        instrument()
    except Exception as error:
        logging.getLogger("rankscope").warning("rankscope: this process is not watched: %s", error)
