"""A job's run time, GPUs and CPUs from Slurm's `scontrol`."""

from __future__ import annotations

import re
import subprocess

from rankscope_exporter.job_report.job import Allocation

TIMEOUT = 20.0  # seconds
RUN_TIME = re.compile(r"\bRunTime=(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
GRES = re.compile(r"\bgpu(?::[^:,\s]+)?:(\d+)")
TRES = re.compile(r"\bgres/gpu=(\d+)")


def ask(job_id: str) -> Allocation | None:
    """Return the job's allocation; None without a controller, or if it no longer knows the job."""
    command = ["scontrol", "--oneliner", "--details", "show", "job", job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)  # noqa: S603 - without a shell
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse(done.stdout) if done.returncode == 0 else None


def parse(text: str) -> Allocation | None:
    """Return the allocation in a line of `scontrol --details show job`; None without a run time or GPUs.

    Except for the job's name, text from the user comes after the fields that are read here.
    """
    fields = text.split("\n", 1)[0].partition(" UserId=")[2]
    ran = RUN_TIME.search(fields)
    gpus = GRES.findall(_field(fields, "JOB_GRES")) or TRES.findall(_field(fields, "AllocTRES"))
    if not (ran and gpus):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in ran.groups())
    total = float(((24 * days + hours) * 60 + minutes) * 60 + seconds)
    return Allocation(_field(fields, "JobState"), total, sum(map(int, gpus)), int(_field(fields, "NumCPUs") or 0))


def _field(fields: str, name: str) -> str:
    found = re.search(rf"(?:^| ){name}=(\S*)", fields)
    return found[1] if found else ""
