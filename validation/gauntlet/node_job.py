"""The gauntlet's training job with each rank on its own node: another name, another run directory, no GPU."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def node(rank: int | str) -> str:
    """Return the name of a rank's node."""
    return f"node-{rank}"


def main() -> None:
    """Run the job on its own node."""
    own = node(os.environ["RANK"])
    os.environ["RANKSCOPE_RUN_DIR"] = str(Path(os.environ["RANKSCOPE_RUN_DIR"], own))
    del os.environ["CUDA_VISIBLE_DEVICES"]
    socket.gethostname = lambda: own
    from testing.job.__main__ import main as train

    train()


if __name__ == "__main__":
    main()
