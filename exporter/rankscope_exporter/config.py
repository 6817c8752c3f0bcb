"""The exporter's configuration: one dataclass, and the only reader of flags and environment."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import platform
import pwd
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope import __version__
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, SYSTEM_RUN_DIR

DEFAULT_PORT = 10417
DEFAULT_REFERENCE_INTERVAL = 30.0  # seconds: twice the scrape interval of deploy/prometheus
ELSEWHERE = dict.fromkeys(("--port", "--host", "--bind", "--address"), "--web.listen-address=HOST:PORT")
"""What flags of other programs are here."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("logfmt", "json")
OWNERS = ("uid", "none")

DESCRIPTION = """\
Prometheus exporter for GPU training: what every GPU of this machine does (NVML), and what every rank that runs
here does (from the records that the training hook writes). Never touches the job; needs no torch."""

EPILOG = """\
examples:
  rankscope-exporter                                   all GPUs, all ranks, on port 10417
  rankscope-exporter --simulate 8                      no GPU needed: eight simulated ones under the real NVML calls
  rankscope-exporter --no-collector.xid --run-dir /mnt/run
pages: /metrics, /-/healthy, /-/ready, / (status); POST /-/release, /-/resume"""


@dataclass(frozen=True)
class Config:
    """Everything that can be set, validated."""

    host: str
    """Address to listen on; empty is every address, IPv6 and IPv4."""
    port: int
    web_config_file: Path | None
    """TLS, basic auth and headers (docs/security.md); None is plain HTTP for everybody."""
    enable_lifecycle: bool
    """Whether POST /-/release and /-/resume do what they say."""
    run_dirs: tuple[Path, ...]
    """Directories with rank records, each read once a second."""
    collectors: tuple[str, ...]
    """Names of the collectors that are on, in their order."""
    dcgm: bool
    """Whether dcgm-exporter's names are served besides ours."""
    slurm_dir: Path | None
    """Where Slurm's prolog leaves one file a GPU."""
    kubelet_socket: Path | None
    """Of the kubelet's pod resources API."""
    reference_interval: float
    """Seconds for which a rank's reference step is shown, at least on average."""
    has_owner: bool
    """Whether a run's identity is its name and its owner's uid, or its name alone."""
    users: frozenset[int] | None
    """Uids of those whose ranks are shown; None: everybody's."""
    procfs: Path
    simulate: str | None
    """A number of GPUs or the path of a scenario; None is the real driver."""
    log_level: str
    log_format: str


def parse(
    collectors: Mapping[str, str],
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
    off: Container[str] = (),
) -> Config:
    """The configuration from flags and environment. `collectors` is each collector's name and one-line help.

    Those in `off` are off unless a flag says otherwise.

    Exits with status 2 and one line on standard error that names the flag that is wrong.
    """
    parser = _parser(collectors, off)
    options = parser.parse_args(arguments)
    try:
        host, port = parse_address(options.listen_address)
    except ValueError as error:
        parser.exit(2, f"rankscope-exporter: --web.listen-address: {error}\n")
    names = tuple(name for name in collectors if getattr(options, f"collector.{name}"))
    if options.dcgm and "gpu" not in names:
        parser.exit(2, "rankscope-exporter: --metrics.dcgm: needs --collector.gpu, which its labels come from\n")
    return Config(
        host=host,
        port=port,
        web_config_file=options.web_config_file,
        enable_lifecycle=options.enable_lifecycle,
        run_dirs=_run_dirs(options.run_dir, environment),
        collectors=names,
        dcgm=options.dcgm,
        slurm_dir=options.slurm_dir,
        kubelet_socket=options.kubelet_socket,
        reference_interval=options.reference_interval,
        has_owner=options.ranks_owner == "uid",
        users=options.ranks_users,
        procfs=options.procfs,
        simulate=options.simulate,
        log_level=options.log_level,
        log_format=options.log_format,
    )


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[v6]:port` or `:port`. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT or :PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _interval(text: str) -> float:
    """Raises what argparse makes a message of. Ranks are looked at once a second, so no step can be shown for less."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 1 or more")
    return seconds


def _users(text: str) -> frozenset[int]:
    """Raises what argparse makes a message of."""
    return frozenset(map(_uid, text.split(",")))


def _uid(user: str) -> int:
    if user.isdecimal() and len(user) <= 10:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):  # the latter of what cannot be a name
        raise argparse.ArgumentTypeError(f"{user!r} is no user of this machine, and no uid") from None


def _run_dirs(given: list[Path] | None, environment: Mapping[str, str]) -> tuple[Path, ...]:
    if given:
        return tuple(given)
    if named := environment.get("RANKSCOPE_RUN_DIR"):
        return (Path(named),)
    return (SYSTEM_RUN_DIR, SHARED_MEMORY_RUN_DIR)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn; exit() is it
        """One line, without the usage: the flag that is wrong is what the reader needs, and the one that was meant."""
        wrong = re.search(r"unrecognized arguments: (--[\w.-]+)", message)
        meant = self._meant(wrong[1]) if wrong else None
        self.exit(2, f"{self.prog}: {message} ({f'is {meant} meant? ' if meant else ''}see {self.prog} --help)\n")

    def _meant(self, flag: str) -> str | None:
        known = [name for action in self._actions for name in action.option_strings]
        return ELSEWHERE.get(flag) or next(iter(difflib.get_close_matches(flag, known, 1)), None)


def _parser(collectors: Mapping[str, str], off: Container[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rankscope-exporter",
        usage="%(prog)s [FLAG …]",  # argparse's own would list each collector twice
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    version = f"rankscope-exporter {__version__} (Python {platform.python_version()})"
    add("--version", action="version", version=version)
    add(
        "--web.listen-address",
        dest="listen_address",
        default=f":{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="where to serve; without a host, every address (default: %(default)s)",
    )
    add(
        "--web.config.file",
        dest="web_config_file",
        type=Path,
        metavar="FILE",
        help="TLS, client certificates and basic auth, in the format of the Prometheus exporters (docs/security.md)",
    )
    add(
        "--web.enable-lifecycle",
        dest="enable_lifecycle",
        action="store_true",
        help="let POST /-/release give the driver's handles back, for a GPU's reset, and /-/resume take them again",
    )
    add(
        "--run-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="where ranks leave their records; may be given more than once "
        f"(default: $RANKSCOPE_RUN_DIR, else {SYSTEM_RUN_DIR} and {SHARED_MEMORY_RUN_DIR})",
    )
    add(
        "--metrics.dcgm",
        dest="dcgm",
        action="store_true",
        help="serve dcgm-exporter's default counters too, by its names, labels and units (docs/dcgm.md)",
    )
    add(
        "--simulate",
        metavar="N|FILE",
        help="N simulated GPUs that follow the ranks, or those of a scenario file, instead of the NVIDIA driver",
    )
    add("--log.level", dest="log_level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    add("--log.format", dest="log_format", choices=LOG_FORMATS, default="logfmt", help="(default: %(default)s)")
    group = parser.add_argument_group("collectors", "--no-collector.NAME switches one off, --collector.NAME one on")
    _add_allocation(group)
    group.add_argument(
        "--collector.alignment.reference-interval",
        dest="reference_interval",
        type=_interval,
        default=DEFAULT_REFERENCE_INTERVAL,
        metavar="SECONDS",
        help="how long a rank shows its reference step, by which ranks of several nodes are compared, on average: at "
        "least twice the scrape interval, and alike on all nodes (default: %(default)g)",
    )
    group.add_argument(
        "--collector.ranks.owner",
        dest="ranks_owner",
        choices=OWNERS,
        default="uid",
        help="the label `owner` of ranks: the uid of their records' files, by which two users' runs of one name are "
        "told apart; `none`, alike on all nodes, where each pod of a run has a user namespace and uids of its own: "
        "then whoever may write records can write one about any run (default: %(default)s)",
    )
    group.add_argument(
        "--collector.ranks.users",
        dest="ranks_users",
        type=_users,
        metavar="USER,…",
        help="whose ranks are shown, by names or uids; records of others are not read (default: everybody's)",
    )
    for name, text in collectors.items():
        group.add_argument(
            f"--collector.{name}",
            action=argparse.BooleanOptionalAction,
            default=name not in off,
            help=text if name not in off else f"{text}; off unless asked for",
        )
    return parser


def _add_allocation(group: argparse._ArgumentGroup) -> None:
    """Where the collector `allocation` asks who holds a GPU, besides the processes on it and the ranks."""
    group.add_argument(
        "--collector.allocation.slurm-dir",
        dest="slurm_dir",
        type=Path,
        metavar="DIR",
        help="where Slurm's prolog leaves one file a GPU with its jobs (deploy/slurm), as for dcgm-exporter",
    )
    group.add_argument(
        "--collector.allocation.kubelet-socket",
        dest="kubelet_socket",
        type=Path,
        metavar="PATH",
        help="the kubelet's pod resources socket, usually /var/lib/kubelet/pod-resources/kubelet.sock; "
        "needs rankscope[kubernetes]",
    )
    group.add_argument(
        "--path.procfs",
        dest="procfs",
        type=Path,
        default=Path("/proc"),
        metavar="DIR",
        help="where the host's processes are seen (default: %(default)s)",
    )
