"""The gauntlet's training job on several nodes: each has another name, run directory and GPUs."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def node(index: int | str) -> str:
    """Return the name of a node."""
    return f"node-{index}"


def main() -> None:
    """Run a rank of the job on its node."""
    name = move_to_node()
    socket.gethostname = lambda: name
    from testing.job.__main__ import main as train

    train()


def move_to_node() -> str:
    """Change the environment of a rank to that of its node. Return the node's name."""
    ranks = int(os.environ["RANKS_PER_NODE"])
    index, local_rank = divmod(int(os.environ["RANK"]), ranks)
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[index * ranks : (index + 1) * ranks]
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANKSCOPE_RUN_DIR": str(Path(os.environ["RANKSCOPE_RUN_DIR"], node(index))),
    }
    return node(index)


if __name__ == "__main__":
    main()
