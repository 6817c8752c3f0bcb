"""Slurm jobs: from the files that the prolog leaves, one a GPU, and from the cgroup of a process.

The files are those of dcgm-exporter's HPC job mapping, so one prolog serves both: in a directory, named by the GPU's
index, a job id a line. Here a line may go on with what slurmd knows of the job (`4711 uid=1001 user=alice
account=physics partition=gpu sluid=s9G5M8BD1KND00`), or, as older prologs left it, with its user and name (`4711 alice
train large`). A file may be named by the UUID of the GPU or the MIG device, for machines on which Slurm counts the GPUs
otherwise than NVML does.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankscope.record.directory import open_untrusted
from rankscope.record.text import LABEL_LIMIT, replace_unprintable
from rankscope_exporter.gpu.allocation.holder import Holder

FILE_LIMIT = 4096  # bytes: some dozens of jobs
FILE_NAME = re.compile(r"\d+|(?:GPU|MIG)-[0-9a-f-]{36}")
JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?(\+[0-9]+)?")  # also of an array (7_3) and a heterogeneous job (7+1)
FIELDS = {
    "uid": "uid",
    "user": "user",
    "account": "slurm_account",
    "partition": "slurm_partition",
    "sluid": "sluid",
}
"""What a line says of its job, and what that is in a Holder."""
FIELD = re.compile(rf"({'|'.join(FIELDS)})=(\S*)")

# cgroup v1: /slurm/uid_1000/job_4711/step_0; v2: /system.slice/slurmstepd.scope/job_4711/step_0/user/task_0; with
# several slurmd on a machine the first part has the node's name in it (slurm.schedmd.com/cgroup_v2.html). Slurm 26.05
# names it by the job's SLUID, an `s` and 13 digits of Crockford's base 32 (src/common/sluid.c).
SLUID = re.compile(r"s[0-9A-HJKMNP-TV-Z]{13}")
JOB_CGROUP = re.compile(rf"slurm[^/]*/(?:uid_\d+/)?(?:job_(\d+)|({SLUID.pattern}))(?:/|$)", re.MULTILINE)

logger = logging.getLogger(__name__)


class SlurmJobs:
    """The jobs in the prolog's directory. One that does not exist is empty: the first prolog after a boot makes it."""

    name = "slurm"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not directory.is_dir():
            logger.warning("%s does not exist yet: no Slurm job is known until a prolog makes it", directory)

    def holders(self) -> Mapping[str, Sequence[Holder]]:
        """By index or UUID. Raises OSError if the directory or one of its files cannot be read."""
        try:
            names = sorted(entry.name for entry in os.scandir(self._directory) if _is_job_file(entry))
        except FileNotFoundError:
            return {}
        return {name: self._jobs(name) for name in names}

    def _jobs(self, name: str) -> list[Holder]:
        try:
            return parse_jobs(_read(self._directory / name))
        except FileNotFoundError:  # the epilog has just removed it
            return []


def parse_jobs(text: str) -> list[Holder]:
    """A job a line: its id, and what else is known of it. Other lines count as nothing.

    Lines end with a line feed and with nothing else: a job's name is its user's, and may have whatever else ends one.
    """
    words = (line.split(maxsplit=1) for line in text.split("\n"))
    return [_job(*line) for line in words if line and JOB_ID.fullmatch(line[0])]


def _job(job: str, rest: str = "") -> Holder:
    user, name = [*rest.split(maxsplit=1), "", ""][:2]
    said = {"user": user, "slurm_job_name": name}
    if FIELD.fullmatch(user):
        said = {FIELDS[field[1]]: field[2] for field in map(FIELD.fullmatch, rest.split()) if field}
    labels = {field: replace_unprintable(value, LABEL_LIMIT) for field, value in said.items()}
    return Holder("slurm", slurm_job_id=job, **labels)


def job_of_cgroup(cgroup: str) -> str:
    """The job in whose cgroup a process is (the text of /proc/PID/cgroup): its id or its SLUID; empty if in none."""
    found = JOB_CGROUP.search(cgroup)
    return found[1] or found[2] if found else ""


def _is_job_file(entry: os.DirEntry[str]) -> bool:
    return bool(FILE_NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)


def _read(path: Path) -> str:
    """Return the complete lines within the first FILE_LIMIT bytes. Raises OSError."""
    descriptor = open_untrusted(path)
    try:
        data = os.read(descriptor, FILE_LIMIT + 1)
    finally:
        os.close(descriptor)
    if len(data) > FILE_LIMIT:  # of a line that is cut off the number may be another job's
        data = data[: data.rfind(b"\n", 0, FILE_LIMIT) + 1]
    return data.decode(errors="replace")
