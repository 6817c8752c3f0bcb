"""Selection of the GPUs that are checked: those that are asked for, else the job's, else all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from rankscope_exporter.node_check.readings import Facts

RANGE, LARGEST = re.compile(r"[0-9]{1,4}-[0-9]{1,4}"), 64


class SelectionError(Exception):
    """The selection cannot be understood. The message names its source."""


def wanted(option: str | None, environ: Mapping[str, str]) -> tuple[str, Sequence[str] | None]:
    """Return the source of the selection and its names, which are indices and UUIDs; None for all GPUs.

    In a prolog, CUDA_VISIBLE_DEVICES has UUIDs (MIG, and from Slurm 25.11 on) or numbers that only the job understands;
    SLURM_JOB_GPUS has the node's numbers. Raises SelectionError.
    """
    if option is not None:
        return "--gpus", None if option == "all" else _valid("--gpus", option)
    visible, of_job = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("SLURM_JOB_GPUS")
    is_prolog = is_slurm_prolog(environ)
    if is_prolog and of_job is not None and "-" not in (visible or "").replace("-1", ""):
        return "SLURM_JOB_GPUS", _valid("SLURM_JOB_GPUS", of_job)
    if visible is not None:
        # As CUDA does: those before the first invalid one, such as -1.
        return "CUDA_VISIBLE_DEVICES", [*takewhile(_is_valid, _names(visible))]
    return ("this job", ()) if is_prolog else ("", None)


def is_slurm_prolog(environ: Mapping[str, str]) -> bool:
    """Return whether this is slurmd's prolog, which is not part of the job. A task prolog is."""
    return environ.get("SLURM_SCRIPT_CONTEXT") == "prolog_slurmd"


def select(names: Sequence[str] | None, gpus: Sequence[Facts]) -> tuple[list[Facts], list[str]]:
    """Return the selected GPUs, and the names that no GPU has."""
    if names is None:
        return list(gpus), []
    found: dict[int, Facts] = {}
    missing = []
    for name in names:
        matching = [gpu for gpu in gpus if _is_named(gpu, name)]
        found |= {gpu.index: gpu for gpu in matching}
        missing += [] if matching else [name]
    return [found[index] for index in sorted(found)], missing


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _expanded(names: Sequence[str]) -> list[str]:
    """Return the names with the indices of ranges such as 0-3. A longer range than any node has GPUs stays a name."""
    found: list[str] = []
    for name in names:
        first, _, last = name.partition("-")
        is_range = RANGE.fullmatch(name) and 0 <= int(last) - int(first) < LARGEST
        found += map(str, range(int(first), int(last) + 1)) if is_range else [name]
    return found


def _valid(source: str, text: str) -> Sequence[str]:
    names = _expanded(_names(text))
    for name in names:
        if not _is_valid(name):
            raise SelectionError(f"{source}: {name!r} is no index or UUID of a GPU")
    return names


def _is_valid(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def _is_named(gpu: Facts, name: str) -> bool:
    if name.isdecimal():
        return gpu.index == int(name)
    if name.startswith("MIG-"):
        # Drivers before 470 name the GPU: MIG-GPU-<uuid>/<gpu instance>/<compute instance>.
        return gpu.is_mig and (not name.startswith("MIG-GPU-") or name[4:].partition("/")[0] == gpu.uuid)
    return bool(gpu.uuid) and gpu.uuid.startswith(name)
