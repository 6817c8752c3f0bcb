"""The command line `rankscope`: `rankscope run -- torchrun … train.py` starts an unchanged job with the hook.

The other commands show and explain what the hook and the exporter have recorded.
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

RUN_DIRS = "default: $RANKSCOPE_RUN_DIR, else /run/rankscope and /dev/shm/rankscope"
DESCRIPTION = "Find out which rank slows down a training job, and why."
RUN_DESCRIPTION = """\
Start COMMAND and watch every rank: sets RANKSCOPE=1 and replaces itself with COMMAND, so the launcher sees no extra
process. The same without this command: RANKSCOPE=1 torchrun … train.py, or in the script: import rankscope;
rankscope.instrument(). Rank 0 prints where its record is and, at the end, where its time went; RANKSCOPE_QUIET=1 turns
these lines off."""
STACKS_DESCRIPTION = """\
Show where the living ranks on this machine stand: one sentence about what differs, then the Python stacks, once for all
ranks that have the same, the rank that differs first. They come from py-spy if it is installed and permitted, else from
the hook. Run it as the job's user, inside the job's container if it has one; root sees the ranks of all users. Changes
nothing in the job. With --all-nodes, shows the ranks of a run on all nodes whose exporters allow it. Exits with 1 if a
rank does not answer, with 2 if there is no rank."""
EXPLAIN_DESCRIPTION = """\
Explain why a run is slow: its lost GPU time by cause, the worst finding with its evidence and advice, other findings,
and alerts about its GPUs. Of several runs, each has a line, the worst first. Needs a Prometheus that scrapes the
exporters; runs on any machine. Without --url, if no Prometheus answers, it explains the runs on this machine instead
(needs rankscope[top]). Exits with 2 if there is nothing to explain."""
TOP_DESCRIPTION = """\
Show what is wrong on this machine: findings and advice for each run, its ranks with their time by phase, and the GPUs.
Reads the ranks' records and the NVIDIA driver; needs neither an exporter nor Prometheus, and changes nothing in the
job. With --url, shows the nodes of other exporters, or all that an analyzer knows, with their runs, the worst first,
and which of them do not answer. Keys: q quits, n and p (or the arrows) choose the run that is shown in full.
Install: pip install 'rankscope[top] @ git+https://github.com/rankscope/rankscope'."""
HANG_DESCRIPTION = """\
Show which ranks block a run that hangs, in which operation, and which ranks wait for them. Reads the dumps of torch's
flight recorder in DIR, or the records of the ranks on this machine: of a run that spans several nodes, run it on each.
Changes nothing in the job. Exits with 2 if there is nothing to read."""
CAPTURE_DESCRIPTION = """\
Write what this node knows about a run that hangs to a new folder in DIR, which only you and the job's user may read:
each rank's phase, collectives, stacks, processes and threads, what NCCL and the kernel say, and a page report.html on
top. Prints the first sentence of that page and its path. Run it as the job's user, or as root. Changes nothing in the
job; py-spy pauses it for a moment. Exits with 2 if there is nothing to capture."""
REPORT_DESCRIPTION = """\
Print where a job's GPU time went over its whole life, in shares that sum to 100%, with its GPUs, CPUs, energy, findings
and advice: as one page for an email, or as one short line of JSON for Slurm's AdminComment. Reads the exporter's state
on this node, a Prometheus (--url), or the ranks' records in DIR. With --by, prints the GPU-hours per user, account or
partition over a week. Exits with 2 if there is nothing to report."""

CHECK_NODE_DESCRIPTION = """\
Check, before a job, whether the GPUs and the node are fit for it, in less than a minute. Compares each GPU under load
with its peers (clock, matrix product, memory bandwidth), and checks throttling, PCIe, NVLink, memory errors, XIDs,
driver, shared memory, ports, limits, clock and disk. Never touches a GPU that is in use. Without --gpus, it checks the
GPUs of the job (CUDA_VISIBLE_DEVICES, SLURM_JOB_GPUS), or all. Exits with 0 if all is fine, 1 if a check failed, 2 if
there was nothing to check, 3 if a GPU is in use. What is unknown never fails. Needs nvidia-ml-py, and torch with CUDA
for the load; without it, the checks under load are not run."""
HISTORY_DESCRIPTION = """\
Print what has happened to each GPU, network port and node over all runs, the worst first: the findings that named it
and what the runs have lost, XID and memory errors, throttling, links. A run counts against a GPU only with evidence
against it. Reads the state of this node's exporter or of an analyzer: five weeks. Exits with 2 if there is none."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run the command. Exits with 2 if the command line is wrong."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.action == "run":
        _run(parser, options)
        return
    if options.action == "stacks" and options.all_nodes and not options.url:
        parser.error("stacks: --all-nodes needs the URLs of exporters, or of an analyzer, with --url")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding cannot show
    from rankscope.cli import commands

    command = getattr(commands, options.action.replace("-", "_"))
    sys.exit(_status_of(lambda: command(options)))


def _status_of(show: Callable[[], int]) -> int:
    """Return the exit status of a command that prints; 0 if the reader stops early, as `| head` does."""
    try:
        status = show()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Replace this process with the command. Does not return."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("run: no command given; example: rankscope run -- torchrun --nproc-per-node 8 train.py")
    if shutil.which(command[0]) is None:
        parser.error(f"run: no such command: {printable(command[0])}")
    if options.run and not options.run.isprintable():
        parser.error(f"run: the name {printable(options.run)} is not printable; no exporter would show this run")
    os.environ.update(_environment(options))
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's command
    except OSError as error:  # wrong executable format, or environment too large
        parser.error(f"run: {printable(command[0])}: {error.strerror}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("rankscope", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"rankscope {__version__}")
    commands = parser.add_subparsers(
        required=True, dest="action", metavar="run|stacks|explain|top|hang|capture|report|history|check-node"
    )
    run = commands.add_parser("run", help="start a training command and watch every rank", description=RUN_DESCRIPTION)
    run.add_argument("--run", metavar="NAME", help="name of the run (default: Slurm job, torchrun id, or generated)")
    run.add_argument(
        "--run-dir",
        metavar="DIR",
        help="directory for the records (default: $RANKSCOPE_RUN_DIR, else /run/rankscope or /dev/shm/rankscope)",
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="the training command")
    stacks = commands.add_parser("stacks", help="show where each rank stands", description=STACKS_DESCRIPTION)
    stacks.add_argument("--run", metavar="NAME", help="only the ranks of this run")
    stacks.add_argument("--rank", metavar="N", help="only this rank, or several (`4-7`, `0,2,5`)")
    stacks.add_argument("--run-dir", type=Path, metavar="DIR", help=f"directory of the records ({RUN_DIRS})")
    stacks.add_argument(
        "--all-nodes",
        action="store_true",
        help="show a run on all nodes, from the exporters at --url (needs rankscope[top]): each must run with "
        "--web.enable-stacks, as root or as the job's user",
    )
    _add_urls(stacks, "exporters to ask, or an analyzer that names them,")
    _add_header(stacks)
    _add_explain(commands.add_parser("explain", help="explain why a run is slow", description=EXPLAIN_DESCRIPTION))
    _add_top(commands.add_parser("top", help="show what is wrong on this machine", description=TOP_DESCRIPTION))
    hang = commands.add_parser("hang", help="show which ranks block a run that hangs", description=HANG_DESCRIPTION)
    hang.add_argument(
        "dumps",
        type=Path,
        nargs="?",
        metavar="DIR",
        help="directory or file prefix of torch's dumps (such as /tmp/nccl_trace_rank_)",
    )
    hang.add_argument("--run", metavar="NAME", help="run on this machine, if no DIR is given (default: the only one)")
    _add_run_dirs(hang)
    capture = commands.add_parser("capture", help="write what is known of a hang", description=CAPTURE_DESCRIPTION)
    capture.add_argument("run", metavar="RUN", help="run on this machine")
    capture.add_argument(
        "directory", type=Path, nargs="?", default=Path(), metavar="DIR", help="existing directory (default: this one)"
    )
    capture.add_argument(
        "--stacks",
        choices=("hook", "py-spy", "none"),
        default="hook",
        help="how to read stacks: by the hook, by py-spy if it is installed, or not at all (default: %(default)s)",
    )
    _add_run_dirs(capture)
    _add_report(commands.add_parser("report", help="print where a job's GPU time went", description=REPORT_DESCRIPTION))
    _add_history(
        commands.add_parser(
            "history", help="print what has happened to each GPU over all runs", description=HISTORY_DESCRIPTION
        )
    )
    _add_check_node(
        commands.add_parser("check-node", help="check a node before a job", description=CHECK_NODE_DESCRIPTION)
    )
    return parser


def _add_check_node(check_node: argparse.ArgumentParser) -> None:
    check_node.add_argument(
        "--gpus", metavar="LIST", help="indices such as `0-3,5`, or UUIDs, or `all` (default: the job's, or all)"
    )
    check_node.add_argument("--python", metavar="FILE", default="", help="a Python with torch (default: this one)")
    check_node.add_argument(
        "--workers",
        type=_count,
        metavar="N",
        help="loader workers of each rank, for /dev/shm (default: 4)",
    )
    check_node.add_argument("--strict", action="store_true", help="also exit with 1 if there is a warning")
    check_node.add_argument(
        "--simulate", metavar="N|FILE", help="check simulated GPUs, as rankscope-exporter --simulate"
    )
    check_node.add_argument("--json", action="store_true", help="print one line of JSON with all checks")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("must be a number of at least 0")
    return int(text)


def _add_history(history: argparse.ArgumentParser) -> None:
    _add_state_dir(history)
    history.add_argument("--days", type=float, default=7.0, metavar="N", help="number of days (default: 7)")
    history.add_argument("--json", action="store_true", help="print one line of JSON, with all that is known")


def _add_state_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="the exporter's --state-dir (default: /var/lib/rankscope)",
    )


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("run_dir", type=Path, nargs="?", metavar="DIR", help="run directory: report from its records")
    report.add_argument("--run", metavar="NAME", help="name of the run (default: the only one)")
    report.add_argument("--slurm-job", metavar="ID", help="all runs of this Slurm job")
    report.add_argument("--owner", metavar="UID", help="user ID, if several users have a run of this name or job")
    _add_state_dir(report)
    report.add_argument("--url", help="URL of a Prometheus, with USER:PASSWORD@ if needed (default: PROMETHEUS_URL)")
    _add_header(report)
    report.add_argument("--by", choices=("user", "account", "partition"), help="print GPU-hours and lost time of each")
    report.add_argument("--days", type=float, default=7.0, metavar="N", help="with --by: number of days (default: 7)")
    report.add_argument("--price", type=float, metavar="MONEY", help="price of a GPU-hour, in any currency")
    report.add_argument("--kwh-price", type=float, metavar="MONEY", help="price of a kilowatt-hour")
    report.add_argument("--json", action="store_true", help="print one line of JSON, at most 1,023 bytes")


def _add_top(top: argparse.ArgumentParser) -> None:
    top.add_argument(
        "--once", action="store_true", help="measure for 10 s (30 s if steps are long), print once and exit"
    )
    _add_urls(top, "show instead the nodes of these exporters, or of an analyzer,")
    _add_header(top)
    top.add_argument(
        "--json", action="store_true", help="print one line of JSON, as the exporter's /api/v1/runs (docs/api.md)"
    )
    _add_run_dirs(top)


def _add_run_dirs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        action="append",
        default=[],
        help=f"directory of the records; may be repeated ({RUN_DIRS})",
    )


def _add_urls(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--url",
        nargs="+",
        action="extend",
        default=[],
        help=f"{what} at http://HOST:PORT, USER:PASSWORD@ if needed; such as http://node{{1..8}}:10417",
    )


def _add_header(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--header",
        metavar="'NAME: VALUE'|@FILE",
        action="append",
        default=[],
        help="HTTP header for the server, such as 'X-Scope-OrgID: TENANT', or a file with one a line; may be "
        "repeated (default: RANKSCOPE_PROMETHEUS_HEADERS, one a line, which ps does not show)",
    )


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument(
        "--url",
        help="URL of Prometheus, with USER:PASSWORD@ if needed (default: PROMETHEUS_URL, else http://localhost:9090)",
    )
    _add_header(explain)
    explain.add_argument("--run", metavar="NAME", help="name of the run (default: all that are live)")
    explain.add_argument(
        "--cluster", metavar="NAME", help="value of the label cluster, if several clusters have a run of this name"
    )
    explain.add_argument("--owner", metavar="UID", help="user ID, if several users have a run of this name")
    explain.add_argument("--at", metavar="TIME", help="30m (ago), 2026-11-21T02:40 or unix seconds (default: now)")
    explain.add_argument("--json", action="store_true", help="print one line of JSON about one run")
    explain.add_argument("--all", action="store_true", help="without a Prometheus: also losses that a finding explains")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        _warn("TORCH_DEVICE_BACKEND_AUTOLOAD=0 stops torch from loading the hook; call instrument() instead")
    inherited = os.environ.get("RANKSCOPE_RUN", "")
    if not options.run and not inherited.isprintable():
        _warn(f"RANKSCOPE_RUN={printable(inherited, 200)} is not printable; no exporter will show this run")
    named = {"RANKSCOPE": "1", "RANKSCOPE_RUN": options.run, "RANKSCOPE_RUN_DIR": options.run_dir}
    return {name: value for name, value in named.items() if value}


def _warn(text: str) -> None:
    print(f"rankscope: {text}", file=sys.stderr)  # noqa: T201 - this is a command line


if __name__ == "__main__":
    main()
