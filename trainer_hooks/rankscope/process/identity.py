"""Who this rank is: run, rank, node, GPU and process group, from torchrun, Slurm, torch and the environment."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from rankscope._version import __version__
from rankscope.process import environment
from rankscope.record import layout
from rankscope.record.group_name import compact
from rankscope.record.text import LABEL_LIMIT, replace_unprintable

RUN_NAME_LIMIT = 128
JOB_ID_LIMIT = 32
SCRIPT_LIMIT = 96  # so that the time after it is not cut
GPU_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{1,120}")


_inherited: weakref.ref[Any] | None = None  # the process group of the process that this one was forked from


def disown_group() -> None:
    """Take the process group for the parent's, in a forked child: only one that the child makes is its own."""
    global _inherited
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _inherited = weakref.ref(dist.group.WORLD)


def is_distributed() -> bool:
    """Whether this process has a process group now."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return False
    return _inherited is None or _inherited() is not dist.group.WORLD


def has_launcher() -> bool:
    """Whether a launcher has given this process, or the rank that started it, a rank."""
    return bool(environment.number("RANK", "SLURM_PROCID", default=""))


def describe(run: str = "") -> dict[str, Any]:
    """The labels of `rankscope_rank_info`, all of them strings. What is not known is an empty string.

    `run` is the name that the run has already, if this process or its parent is a rank of it.
    """
    import torch

    labels = {
        "run": run_name(run),
        "rank": str(_from_group("get_rank", "RANK", "SLURM_PROCID", default="0")),
        "local_rank": environment.number("LOCAL_RANK", "SLURM_LOCALID", default="0"),
        "world_size": str(_from_group("get_world_size", "WORLD_SIZE", "SLURM_NTASKS", default="1")),
        "group": group_name(),
        "node": environment.text("RANKSCOPE_NODE", LABEL_LIMIT) or socket.gethostname(),
        "pid": str(os.getpid()),
        "uuid": gpu_uuid(),
        "backend": backend(),
        "torch_version": str(torch.__version__),
        "rankscope_version": __version__,
    }
    return {label: replace_unprintable(text, LABEL_LIMIT) for label, text in labels.items()}


def slurm_job() -> dict[str, str]:
    """Return what is known of the Slurm job of this process; empty without one."""
    if not os.environ.get("SLURM_JOB_ID"):
        return {}
    job = {name: os.environ.get(f"SLURM_JOB_{name.removeprefix('job_').upper()}", "") for name in layout.SLURM}
    return {name: replace_unprintable(text, LABEL_LIMIT) for name, text in job.items() if text}


def backend() -> str:
    """Return the process group's backend for the type of device that the process uses; empty without a group.

    A group that was made without a name, or with a name for each type of device, has several backends.
    """
    if not is_distributed():
        return ""
    import torch
    import torch.distributed as dist

    name = str(dist.get_backend())
    if name not in ("undefined", "custom") and ":" not in name:
        return name
    device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]  # torch's gap
    backends = dist.get_backend_config()
    by_device = dict(one.partition(":")[::2] for one in backends.split(","))
    return by_device.get(device) or backends


def run_name(before: str = "") -> str:
    """One name on every rank of a run and on every node.

    RANKSCOPE_RUN, else the Slurm job, else torchrun's run id unless that is `none` (its default without a
    rendezvous id), else a name that the ranks agree on through the process group's store: `before`, if the run has a
    name already.
    """
    if name := environment.text("RANKSCOPE_RUN", RUN_NAME_LIMIT):
        return name
    if job := environment.text("SLURM_JOB_ID", JOB_ID_LIMIT):
        name = environment.text("SLURM_JOB_NAME", RUN_NAME_LIMIT - len(job) - 1)
        return f"{name or 'slurm'}-{job}"
    run_id = environment.text("TORCHELASTIC_RUN_ID", RUN_NAME_LIMIT)
    return run_id if run_id not in ("", "none") else replace_unprintable(_agreed_name(before), RUN_NAME_LIMIT)


def _agreed_name(before: str) -> str:
    name = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python").stem
    script = replace_unprintable(name, SCRIPT_LIMIT)
    proposal = before or f"{script}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    if not is_distributed():
        return proposal
    from torch.distributed.distributed_c10d import _get_default_store

    # compare_set neither waits nor needs an order: whoever comes first names the run, the others read it.
    # (A get would block for the store's half hour if rank 0 were not instrumented.)
    agreed = _get_default_store().compare_set("rankscope/run", "", proposal)
    return agreed.decode() if isinstance(agreed, bytes) else str(agreed)


def group_name(process_group: Any = None) -> str:
    """The ranks that synchronize with each other, compactly: `0-3`, `0-6:2`, `1,4,5`. None is the default group."""
    if not is_distributed():
        return environment.number("RANK", default="0")
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    return compact(sorted(ranks))


def gpu_uuid() -> str:
    """The UUID of this rank's GPU: the CUDA device in use, else that at its index in a CUDA_VISIBLE_DEVICES of UUIDs.

    CUDA is asked only where the job has already initialized it: doing so ourselves would cost hundreds of MB.
    """
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", "")
        return f"GPU-{uuid}" if uuid and not str(uuid).startswith(("GPU-", "MIG-")) else str(uuid)
    visible = [device.strip() for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    local_rank = int(environment.number("LOCAL_RANK", "SLURM_LOCALID", default="0"))
    mine = visible[local_rank] if local_rank < len(visible) else ""
    return mine if GPU_UUID.fullmatch(mine) else ""


def file_name(info: dict[str, Any]) -> str:
    """The record's file name without its suffix: readable, safe in any file system, one a process."""
    return f"{file_prefix(info['run'])}{info['rank']}.{info['pid']}"


def file_prefix(run: str) -> str:
    """Return what the names of the records of a run begin with."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", run).lstrip(".") + "."


def _from_group(question: str, *variables: str, default: str) -> Any:
    if is_distributed():
        import torch.distributed as dist

        return getattr(dist, question)()
    return environment.number(*variables, default=default)
