"""The command `rankscope`: `rankscope run -- torchrun … train.py` starts a job watched, without a change to it;
`rankscope stacks` says where the threads of the ranks on this machine are; `rankscope explain` what holds a run back;
`rankscope top` what is wrong on this machine; `rankscope hang` who holds up a run that stands still; `rankscope report`
what a job's GPU time went to.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rankscope._version import __version__
from rankscope.cli.printable import printable

DESCRIPTION = "Rankscope's hook for training jobs: which rank holds the others up, and why."
RUN_DESCRIPTION = """\
Start COMMAND with every rank watched: sets RANKSCOPE=1 and replaces itself with the command, so nothing stands
between the job and its launcher. The same without this command: RANKSCOPE=1 torchrun … train.py; or in the
script: import rankscope; rankscope.instrument(). Rank 0 says on standard error where the record is and, at the end,
where its time went; RANKSCOPE_QUIET=1 keeps it from that."""


STACKS_DESCRIPTION = """\
Print the Python stacks of every thread of every living rank on this machine: by py-spy where it is installed and
permitted, else by the hook itself. To be run as the job's user, in the job's container if it has one; root is shown
everybody's ranks. Changes nothing in the job. Exits with 1 if a rank does not answer, with 2 if there is none."""
EXPLAIN_DESCRIPTION = """\
Say what holds a run back: its GPU time by what it is lost to, the alert that the rules have come to, the numbers
compared, and where to read on. Asks a Prometheus that has Rankscope's rules. To be run anywhere. Where no Prometheus
is named and none answers, it says what the ranks on this machine show (needs rankscope[top]). Exits with 2 if there is
nothing to explain."""

TOP_DESCRIPTION = """\
Show what is wrong on this machine, from the ranks' records and the NVIDIA driver alone: what is found in each run and
what to do about it, its ranks with their time by phase, and the GPUs. Needs neither an exporter nor a Prometheus, and
changes nothing in the job. Needs pip install 'rankscope[top]'. Ctrl-C ends it."""
HANG_DESCRIPTION = """\
Say in a few lines who holds up a run that stands still, in which operation, and who waits for it: from the dumps of
torch's flight recorder in DIR, or from the records of the ranks on this machine. Changes nothing in the job. Exits with
2 if there is nothing to read."""
REPORT_DESCRIPTION = """\
Print what a job's GPU time went to over its whole life, in parts that sum to one, with its GPUs, CPUs, energy,
findings and advice: on one page for a mail, or as one short line of JSON for Slurm's AdminComment. From what the
exporter of this node has saved, from a Prometheus (--url), or from the ranks' records in DIR alone. With --by, the
GPU-hours of a week of each user, account or partition. Exits with 2 if there is nothing to report."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says. Exits with 2 if it is wrong."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.action != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal's encoding does not have
    if options.action == "stacks":
        from rankscope.cli.stacks import show

        sys.exit(_told(lambda: show(options.run, options.rank, options.run_dir)))
    if options.action == "explain":
        from rankscope.cli.explaining.command import show as explain

        sys.exit(_told(lambda: explain(*_asked(options), explain_node=_explain_node(options))))
    if options.action == "top":
        from rankscope.cli.top import show as top

        sys.exit(_told(lambda: top(options.run_dir, once=options.once, is_json=options.json)))
    if options.action == "hang":
        from rankscope.cli.top import hang

        sys.exit(_told(lambda: hang(options.dumps, options.run, options.run_dir)))
    if options.action == "report":
        from rankscope.cli.top import report

        sys.exit(_told(lambda: report(options)))
    _run(parser, options)


def _asked(options: argparse.Namespace) -> tuple[str, str | None, str | None, str | None, str | None, bool]:
    url = options.url or os.environ.get("PROMETHEUS_URL") or "http://localhost:9090"
    return url, options.run, options.cluster, options.owner, options.at, options.json


def _explain_node(options: argparse.Namespace) -> Callable[[], bool]:
    """Return what explains this node's runs without a Prometheus: not where one is named, which then has to answer."""
    from rankscope.cli.top import explain

    is_named = bool(options.url or options.cluster or os.environ.get("PROMETHEUS_URL"))
    return lambda: not is_named and explain(options.run, options.owner)


def _told(tell: Callable[[], int]) -> int:
    """The status of what writes to the standard output, also where nobody reads that to the end, as `| head` does."""
    try:
        status = tell()
        sys.stdout.flush()
    except BrokenPipeError:
        # At its end Python tries once more to write what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Become the command, under its process ID. Does not return."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("run: no command given, as in: rankscope run -- torchrun --nproc-per-node 8 train.py")
    if shutil.which(command[0]) is None:
        parser.error(f"run: no such command: {printable(command[0])}")
    if options.run and not options.run.isprintable():
        parser.error(f"run: the name {printable(options.run)} is not printable: no exporter would show such a run")
    os.environ.update(_environment(options))
    try:
        os.execvp(command[0], command)  # noqa: S606 - running the user's command is what this is for
    except OSError as error:  # of another machine's format, or an environment that is too large
        parser.error(f"run: {printable(command[0])}: {error.strerror}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("rankscope", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"rankscope {__version__}")
    commands = parser.add_subparsers(required=True, dest="action", metavar="run|stacks|explain|top|hang|report")
    run = commands.add_parser(
        "run", help="start a training command with every rank watched", description=RUN_DESCRIPTION
    )
    run.add_argument("--run", metavar="NAME", help="name of the run (default: Slurm's job, torchrun's id, or agreed)")
    run.add_argument(
        "--run-dir", metavar="DIR", help="where the ranks' records go (default: /run/rankscope or /dev/shm)"
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="the training command")
    stacks = commands.add_parser("stacks", help="where every thread of every rank is", description=STACKS_DESCRIPTION)
    stacks.add_argument("--run", metavar="NAME", help="only the ranks of this run")
    stacks.add_argument("--rank", metavar="N", help="only this rank")
    stacks.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where the ranks' records are (default: /run/rankscope, /dev/shm)"
    )
    _add_explain(commands.add_parser("explain", help="what holds a run back", description=EXPLAIN_DESCRIPTION))
    _add_top(commands.add_parser("top", help="what is wrong on this machine", description=TOP_DESCRIPTION))
    hang = commands.add_parser("hang", help="who holds up a run that stands still", description=HANG_DESCRIPTION)
    hang.add_argument(
        "dumps",
        type=Path,
        nargs="?",
        metavar="DIR",
        help="directory of torch's dumps, or their prefix (/tmp/nccl_trace_rank_)",
    )
    hang.add_argument("--run", metavar="NAME", help="which run of this machine, without DIR (default: the only one)")
    _add_run_dirs(hang)
    _add_report(commands.add_parser("report", help="what a job's GPU time went to", description=REPORT_DESCRIPTION))
    return parser


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("run_dir", type=Path, nargs="?", metavar="DIR", help="a run directory: what its records say")
    report.add_argument("--run", metavar="NAME", help="which run (default: the only one)")
    report.add_argument("--slurm-job", metavar="ID", help="all runs of this Slurm job")
    report.add_argument("--owner", metavar="UID", help="whose, where several users have runs of that name or job")
    report.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="what the exporter was given as such (default: /var/lib/rankscope)",
    )
    report.add_argument("--url", help="of a Prometheus, with USER:PASSWORD@ if it asks (default: PROMETHEUS_URL)")
    report.add_argument(
        "--by", choices=("user", "account", "partition"), help="GPU-hours of each, and what they were lost to"
    )
    report.add_argument("--days", type=float, default=7.0, metavar="N", help="with --by: how many (default: 7)")
    report.add_argument("--price", type=float, metavar="MONEY", help="of a GPU-hour, in any currency")
    report.add_argument("--kwh-price", type=float, metavar="MONEY", help="of a kilowatt-hour")
    report.add_argument("--json", action="store_true", help="one line of JSON, shorter than 1,024 bytes")


def _add_top(top: argparse.ArgumentParser) -> None:
    top.add_argument(
        "--once", action="store_true", help="look for ten seconds (30 where steps are long) and print once"
    )
    top.add_argument(
        "--json", action="store_true", help="the same as one line of JSON, as the exporter's /api/v1/runs (docs/api.md)"
    )
    _add_run_dirs(top)


def _add_run_dirs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        action="append",
        default=[],
        help="where the ranks' records are; may be given more than once (default: /run/rankscope, /dev/shm)",
    )


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument(
        "--url",
        help="of the Prometheus, with USER:PASSWORD@ if it asks (default: PROMETHEUS_URL, else http://localhost:9090)",
    )
    explain.add_argument("--run", metavar="NAME", help="which run (default: the only one)")
    explain.add_argument("--cluster", metavar="NAME", help="which cluster, where several have such a run (its label)")
    explain.add_argument("--owner", metavar="UID", help="whose run, where several users have one of that name")
    explain.add_argument("--at", metavar="TIME", help="30m (ago), 2026-11-21T02:40 or unix seconds (default: now)")
    explain.add_argument("--json", action="store_true", help="one line of JSON")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        _warn("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading the hook; call instrument() instead")
    inherited = os.environ.get("RANKSCOPE_RUN", "")
    if not options.run and not inherited.isprintable():
        _warn(f"RANKSCOPE_RUN={printable(inherited, 200)} is not printable: no exporter will show this run")
    named = {"RANKSCOPE": "1", "RANKSCOPE_RUN": options.run, "RANKSCOPE_RUN_DIR": options.run_dir}
    return {name: value for name, value in named.items() if value}


def _warn(text: str) -> None:
    print(f"rankscope: {text}", file=sys.stderr)  # noqa: T201 - this is a command line


if __name__ == "__main__":
    main()
