"""The identity of this rank: run, rank, node, GPU, process group; from torchrun, Slurm, torch and the environment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rankscope._version import __version__
from rankscope.process import environment
from rankscope.record import layout
from rankscope.record.group_name import compact
from rankscope.record.process_stat import PROCFS, ancestors, read_process_stat
from rankscope.record.text import LABEL_LIMIT, NUMBER, replace_unprintable

RUN_NAME_LIMIT = 128
JOB_ID_LIMIT = 32
RENDEZVOUS_LIMIT = 64
SCRIPT_LIMIT = 96  # leaves space for the time after it
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch scripts, interactive shells and other steps without tasks of srun
GPU_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{1,120}")


_inherited: weakref.ref[Any] | None = None  # the process group of the process that this one was forked from


def mark_group_as_inherited() -> None:
    """Mark the process group as the parent's, in a forked child. Only a group that the child makes is its own."""
    global _inherited
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _inherited = weakref.ref(dist.group.WORLD)


def is_distributed() -> bool:
    """Return whether this process has a process group now."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return False
    return _inherited is None or _inherited() is not dist.group.WORLD


def has_peers() -> bool:
    """Return whether this process trains with others: it has a process group of at least two."""
    import torch.distributed as dist

    return is_distributed() and dist.get_world_size() > 1


def inherits_rank() -> bool:
    """Return whether a Python process that a launcher made a rank has started this process.

    A process that a launcher starts has variables that the launcher itself does not have. A shell may start a rank.
    """
    own = _launched("self")
    return any(theirs and own.items() <= theirs.items() for theirs in map(_launched, ancestors()))


def _launched(pid: int | str) -> dict[str, str]:
    """Return the variables of a rank that a Python process was started with; empty if it is none, or is hidden."""
    process = PROCFS / str(pid)
    try:
        if not (process / "exe").readlink().name.startswith("python"):
            return {}
        text = (process / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    started_with = dict(one.partition("=")[::2] for one in text.split("\0"))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", *_of_task("SLURM_PROCID", started_with))
    found = {name: started_with[name] for name in names if name in started_with}
    return found if "RANK" in found or "SLURM_PROCID" in found else {}


def has_launcher() -> bool:
    """Return whether a launcher has assigned one of several ranks to this process, or to the rank that started it.

    A launcher of one process assigns nothing: the same variables may hold for several trainings of one batch script.
    """
    rank = environment.number("RANK", *_of_task("SLURM_PROCID"), default="")
    return bool(rank) and environment.number("WORLD_SIZE", *_of_task("SLURM_NTASKS"), default="") != "1"


def launched_ranks() -> int:
    """Return the number of ranks that the launcher says it has started; 1 without a launcher."""
    return int(environment.number("WORLD_SIZE", *_of_task("SLURM_NTASKS"), default="1"))


def _of_task(variable: str, variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return a variable of Slurm if it describes a task of srun; empty if it describes the allocation.

    Each process of a batch script has SLURM_PROCID=0 and the allocation's SLURM_NTASKS. Only a task of srun is in an
    ordinary step: the batch script and an interactive shell may have a step number of their own.
    """
    step = variables.get("SLURM_STEP_ID", "")
    return (variable,) if NUMBER.fullmatch(step) and int(step) < FIRST_SPECIAL_STEP else ()


def describe(run: str = "") -> dict[str, Any]:
    """Return the labels of `rankscope_rank_info`. An unknown value is an empty string.

    A process without a group of at least two is a run of one, whatever its launcher says. `run` is the run's existing
    name, if this process or its parent is a rank of it.
    """
    import torch
    import torch.distributed as dist

    labels = {
        "run": run_name(run),
        "rank": rank(),
        "local_rank": environment.number("LOCAL_RANK", *_of_task("SLURM_LOCALID"), default="0"),
        "world_size": str(dist.get_world_size()) if has_peers() else "1",
        "group": group_name(),
        "node": environment.text("RANKSCOPE_NODE", LABEL_LIMIT) or socket.gethostname(),
        "pid": str(os.getpid()),
        "backend": backend(),
        "torch_version": str(torch.__version__),
        "rankscope_version": __version__,
    }
    return {label: replace_unprintable(text, LABEL_LIMIT) for label, text in labels.items()}


def rank() -> str:
    """Return the rank in the process group, or without peers the launcher's number for this process."""
    import torch.distributed as dist

    return str(dist.get_rank()) if has_peers() else environment.number("RANK", *_of_task("SLURM_PROCID"), default="0")


def slurm_job() -> dict[str, str]:
    """Return the known values of this process's Slurm job; empty without one."""
    if not os.environ.get("SLURM_JOB_ID"):
        return {}
    job = {name: os.environ.get(f"SLURM_JOB_{name.removeprefix('job_').upper()}", "") for name in layout.SLURM}
    return {name: replace_unprintable(text, LABEL_LIMIT) for name, text in job.items() if text}


def rendezvous() -> str:
    """Return the address and port at which the ranks meet, as the environment names them; empty without peers.

    Nodes of one job may name them differently: the master's own may have `localhost`.
    """
    address, port = (os.environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT"))
    return replace_unprintable(f"{address}:{port}", RENDEZVOUS_LIMIT) if address and has_peers() else ""


def backend() -> str:
    """Return the process group's backend for the device type that the process uses; empty without a group.

    A group created without a backend name, or with one for each device type, has several backends.
    """
    if not is_distributed():
        return ""
    import torch
    import torch.distributed as dist

    name = str(dist.get_backend())
    if name not in ("undefined", "custom") and ":" not in name:
        return name
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    backends = dist.get_backend_config()
    by_device = dict(one.partition(":")[::2] for one in backends.split(","))
    return by_device.get(device) or backends


def run_name(before: str = "") -> str:
    """Return the name of the run, the same on every rank and node.

    RANKSCOPE_RUN, else the Slurm job, else torchrun's run id unless that is `none` (its default without a rendezvous
    id), else a name that the ranks agree on through the process group's store: `before`, if the run already has one.
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

    # compare_set does not wait: the first rank names the run, the others read the name.
    # (A get would block for the store's timeout of 30 min if rank 0 were not instrumented.)
    try:
        agreed = _get_default_store().compare_set("rankscope/run", "", proposal)
        return agreed.decode() if isinstance(agreed, bytes) else str(agreed)
    except Exception:  # a store written in Python may lack the method, or be gone since the group was made
        return before or _name_by_parent(script) or proposal


def _name_by_parent(script: str) -> str:
    """Return a name that the ranks of one launcher process share; empty if none is known to have started them."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    is_spawned = multiprocessing is not None and multiprocessing.parent_process() is not None
    if not (is_spawned or "TORCHELASTIC_RUN_ID" in os.environ):
        return ""
    try:
        launcher = f"{socket.gethostname()} {os.getppid()} {read_process_stat(os.getppid()).start}"
    except OSError:  # the process is hidden
        return ""
    return f"{script}-{hashlib.sha256(launcher.encode()).hexdigest()[:12]}"


def group_name(process_group: Any = None) -> str:
    """Return the ranks of a group in short form: `0-3`, `0-6:2`, `1,4,5`. None means the default group."""
    if not has_peers():
        return rank()
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(dist.group.WORLD if process_group is None else process_group)
    return compact(sorted(ranks))


def device_in_use(devices: Collection[int] = ()) -> int:
    """Return the index of the CUDA device that this process works on. CUDA must be initialized.

    A job may not call `set_device`: its device is then not the current one, but that of its parameters (`devices`), or
    if these are not known, one with allocated memory.
    """
    from torch import cuda

    current, known = cuda.current_device(), list(devices)
    if not known:
        with contextlib.suppress(RuntimeError):  # the job's own allocator has no statistics
            known = [index for index in range(cuda.device_count()) if cuda.memory_allocated(index)]
    return current if current in known else min(known, default=current)


def gpu_uuid(device: int | None = None) -> str:
    """Return the UUID of the CUDA device in use, else the one at this rank's index in a CUDA_VISIBLE_DEVICES of UUIDs.

    `device` is the device's index, if it is known. CUDA is called only if the job has already initialized it:
    initializing it takes hundreds of MB.
    """
    import torch

    if torch.cuda.is_initialized():
        index = device_in_use() if device is None else device
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", "")
        return f"GPU-{uuid}" if uuid and not str(uuid).startswith(("GPU-", "MIG-")) else str(uuid)
    visible = [device.strip() for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    local_rank = int(environment.number("LOCAL_RANK", *_of_task("SLURM_LOCALID"), default="0"))
    mine = visible[local_rank] if local_rank < len(visible) else ""
    return mine if GPU_UUID.fullmatch(mine) else ""


def file_name(info: dict[str, Any]) -> str:
    """Return the record's file name without its suffix: readable, safe in any file system, unique per process."""
    return f"{file_prefix(info['run'])}{info['rank']}.{info['pid']}"


def file_prefix(run: str) -> str:
    """Return the prefix of the file names of a run's records."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", run).lstrip(".") + "."
