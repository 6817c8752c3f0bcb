"""Leave a process group without an abort or a hang in one of gloo's threads."""

import os
import time
from pathlib import Path

import torch.distributed as dist


def leave() -> None:
    """Destroy the process group once gloo's threads have released the last backward pass's collectives.

    A collective issued in a backward pass holds Python's context of it (torch.autograd.graph._engine_run_backward). The
    thread that ran it releases the context some time after the wait has ended. If the interpreter ends meanwhile, with
    or without the hook, the process aborts: "terminate called without an active exception" (torch 2.13, gloo; also
    github.com/pytorch/pytorch/pull/179291). With torch 2.4 it may hang: the group's destructor waits for that thread
    and holds the GIL, for which the thread waits.
    """
    for _ in range(100):  # a second, if a thread of the job is always busy
        time.sleep(0.01)  # releases the GIL for the threads that wait for it
        if not any(map(is_running, Path("/proc/self/task").iterdir())):
            break
    dist.destroy_process_group()


def is_running(task: Path) -> bool:
    """Return whether the task is another thread than this one and runs or is ready to run."""
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "S" and int(task.name) != os.getpid()
