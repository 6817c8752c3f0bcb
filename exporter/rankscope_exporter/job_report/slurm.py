"""A job's run time, GPUs and CPUs from Slurm's `scontrol`."""

from __future__ import annotations

import re
import subprocess

from rankscope_exporter.job_report.job import Allocation

TIMEOUT = 20.0  # seconds
NAME = re.compile(r"\d+[_+]\d+|s[0-9A-HJKMNP-TV-Z]{13}")
JOB = re.compile(r"JobId=(\d+) ")
RUN_TIME = re.compile(r"\bRunTime=(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
GRES = re.compile(r"\bgpu(?::[^:,\s]+)?:(\d+)")
TRES = re.compile(r"\bgres/gpu=(\d+)")


def number(job_id: str) -> str:
    """Return the number of the job that is named by an array and its task (7_3), as part of a job (7+1) or by a SLUID.

    Records and prologs only have the number. Without a controller that knows the job, the name is returned.
    """
    if not (NAME.fullmatch(job_id) and (found := JOB.match(_show(job_id)))):
        return job_id
    return found[1]


def ask(job_id: str) -> Allocation | None:
    """Return the job's allocation; None without a controller, or if it no longer knows the job."""
    return parse(_show(job_id))


def _show(job_id: str) -> str:
    command = ["scontrol", "--oneliner", "--details", "show", "job", job_id]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)  # noqa: S603 - without a shell
    except (OSError, subprocess.TimeoutExpired):
        return ""
    # A user may have written the job's name in any encoding.
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


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
