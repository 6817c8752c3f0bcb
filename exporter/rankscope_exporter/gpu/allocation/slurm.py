"""Slurm jobs, from the prolog's files (one per GPU) and from a process's cgroup.

The files are compatible with dcgm-exporter's HPC job mapping: a directory with one file per GPU, named by its index
(`0`) or by the index and a MIG device's GPU instance (`0.7`), with one job id per line. A line may continue with
slurmd's information about the job (`4711 uid=1001 user=alice account=physics partition=gpu sluid=s9G5M8BD1KND00`) or,
from older prologs, with its user and name (`4711 alice train large`). A file may also be named by the UUID of a GPU or
MIG device: Slurm numbers the GPUs in its gres.conf, and each MIG device.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankscope.record.directory import open_untrusted
from rankscope.record.text import LABEL_LIMIT, replace_unprintable
from rankscope_exporter.gpu.allocation.holder import Holder

FILE_LIMIT = 4096  # bytes: dozens of jobs
FILE_NAME = re.compile(r"\d+(?:\.\d+)?|(?:GPU|MIG)-[0-9a-f-]{36}")
JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?(\+[0-9]+)?")  # including array jobs (7_3) and heterogeneous jobs (7+1)
FIELDS = {
    "uid": "uid",
    "user": "user",
    "account": "slurm_account",
    "partition": "slurm_partition",
    "sluid": "sluid",
}
"""Holder field by key in a line of the file."""
FIELD = re.compile(rf"({'|'.join(FIELDS)})=(\S*)")

# cgroup v1: /slurm/uid_1000/job_4711/step_0; v2: /system.slice/slurmstepd.scope/job_4711/step_0/user/task_0. With
# several slurmd on a machine the first part contains the node's name (slurm.schedmd.com/cgroup_v2.html). Slurm 26.05
# uses the job's SLUID: an `s` and 13 digits of Crockford's base 32 (src/common/sluid.c). Below /user.slice, users may
# make cgroups with any name.
SLUID = re.compile(r"s[0-9A-HJKMNP-TV-Z]{13}")
JOB_CGROUP = re.compile(
    rf"^(?!.*/user\.slice/).*?slurm[^/]*/(?:uid_\d+/)?(?:job_(\d+)|({SLUID.pattern}))(?:/|$)", re.MULTILINE
)

logger = logging.getLogger(__name__)


class SlurmJobs:
    """The jobs in the prolog's directory. A missing directory counts as empty: the first prolog creates it."""

    name = "slurm"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not directory.is_dir():
            logger.warning("%s does not exist; Slurm jobs are unknown until a prolog creates it", directory)

    def holders(self) -> Mapping[str, Sequence[Holder]]:
        """Return the holders by index or UUID. Raises OSError if the directory or a file cannot be read."""
        try:
            names = sorted(entry.name for entry in os.scandir(self._directory) if _is_job_file(entry))
        except FileNotFoundError:
            return {}
        found: dict[str, list[Holder]] = defaultdict(list)
        for name in names:
            found[name.partition(".")[0]] += self._jobs(name)
        return found

    def _jobs(self, name: str) -> list[Holder]:
        try:
            return parse_jobs(_read(self._directory / name))
        except FileNotFoundError:  # an epilog has just removed it
            return []


def parse_jobs(text: str) -> list[Holder]:
    """Parse one job per line: its id and optional fields. Other lines are ignored.

    Only a line feed ends a line: users choose job names, which may contain other line separators.
    """
    words = (line.split(maxsplit=1) for line in text.split("\n"))
    return [_job(*line) for line in words if line and JOB_ID.fullmatch(line[0])]


def _job(job: str, rest: str = "") -> Holder:
    user, name = [*rest.split(maxsplit=1), "", ""][:2]
    found = {"user": user, "slurm_job_name": name}
    if FIELD.fullmatch(user):
        found = {FIELDS[field[1]]: field[2] for field in map(FIELD.fullmatch, rest.split()) if field}
    labels = {field: replace_unprintable(value, LABEL_LIMIT) for field, value in found.items()}
    return Holder("slurm", slurm_job_id=job, **labels)


def job_of_cgroup(cgroup: str) -> str:
    """Return the id or SLUID of the job in a process's cgroup (text of /proc/PID/cgroup); empty if there is none."""
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
    if len(data) > FILE_LIMIT:  # a truncated job id could be another job's
        data = data[: data.rfind(b"\n", 0, FILE_LIMIT) + 1]
    return data.decode(errors="replace")
