"""How a job's rank, or a test, leaves its process group without being aborted or held up by one of gloo's threads."""

import os
import time
from pathlib import Path

import torch.distributed as dist


def leave() -> None:
    """Destroy the process group once gloo's threads have let go of the last backward pass's collectives.

    What is issued in a backward pass holds Python's context of it (torch.autograd.graph._engine_run_backward), and the
    thread that did it gives that back some time after the wait for it has ended. Where the interpreter ends meanwhile,
    hook or no hook, the process aborts: "terminate called without an active exception" (torch 2.13, gloo; also
    github.com/pytorch/pytorch/pull/179291). Torch 2.4 may hang: the group's destructor waits for that thread, and keeps
    Python's lock, which the thread waits for.
    """
    for _ in range(100):  # a second, if a thread of the job's own never rests
        time.sleep(0.01)  # without Python's lock: a thread that waits for it goes on
        if not any(map(is_running, Path("/proc/self/task").iterdir())):
            break
    dist.destroy_process_group()


def is_running(task: Path) -> bool:
    """Whether another thread than this one is doing something, or would if it got a core."""
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "S" and int(task.name) != os.getpid()
