"""The exporter's configuration: one dataclass, read from flags and environment variables here and nowhere else.

Each collector declares its flags in its own file; `COLLECTOR_FLAGS` lists them.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import re
import socket
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope import __version__
from rankscope.record.text import LABEL_LIMIT, is_name
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, SYSTEM_RUN_DIR, default_run_dirs
from rankscope_exporter.analyzer.settings import AnalyzerFlags
from rankscope_exporter.capture.settings import CaptureFlags
from rankscope_exporter.flags import add_flags, flag
from rankscope_exporter.gpu.collectors.allocation import AllocationFlags
from rankscope_exporter.ranks.collectors.network import NetworkFlags
from rankscope_exporter.ranks.collectors.ranks import RankFlags
from rankscope_exporter.ranks.diagnosis_service import FindingFlags

DEFAULT_PORT = 10417
EQUIVALENT_FLAGS = dict.fromkeys(("--port", "--host", "--bind", "--address"), "--web.listen-address=HOST:PORT")
"""The exporter's flag by the name that it has in other programs."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("logfmt", "json")

DESCRIPTION = """\
Prometheus exporter for GPU training. Exports metrics of every GPU of this machine (from NVML) and of every training
rank on it (from the records that the training hook writes). Never touches the job. Does not need PyTorch."""

EPILOG = """\
examples:
  rankscope-exporter                                   all GPUs and ranks, on port 10417
  rankscope-exporter --simulate 8                      eight simulated GPUs: needs neither GPU nor driver
  rankscope-exporter --no-collector.xid --run-dir /mnt/run
  rankscope-exporter --analyze node-a,node-b           diagnoses the runs that span these nodes
pages: / (status), /metrics, /api/v1/runs, /api/v1/gpus, /api/v1/facts, /-/healthy, /-/ready
with --web.enable-lifecycle: POST /-/release, POST /-/resume
with --web.enable-stacks: /api/v1/stacks?run=NAME"""


@dataclass(frozen=True, kw_only=True)
class GeneralFlags:
    """Settings that do not belong to a collector."""

    listen_address: str = flag(
        "--web.listen-address",
        default=f":{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="address to listen on; without a host: all interfaces (default: %(default)s)",
    )
    web_config_file: Path | None = flag(
        "--web.config.file",
        type=Path,
        metavar="FILE",
        help="file that sets up TLS, client certificates and basic auth, in Prometheus' format (docs/security.md)",
    )
    enable_lifecycle: bool = flag(
        "--web.enable-lifecycle",
        action="store_true",
        help="allow POST /-/release, which closes the driver for a GPU reset, and /-/resume, which opens it again",
    )
    enable_stacks: bool = flag(
        "--web.enable-stacks",
        action="store_true",
        help="allow GET /api/v1/stacks, which asks the ranks of a run for their Python stacks, for rankscope stacks "
        "--all-nodes; as root, or as the job's user (docs/security.md)",
    )
    run_dirs: tuple[Path, ...] = flag(
        "--run-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="directory where training ranks write their records; can be repeated "
        f"(default: $RANKSCOPE_RUN_DIR, else {SYSTEM_RUN_DIR} and {SHARED_MEMORY_RUN_DIR})",
    )
    node: str = flag(
        "--node",
        metavar="NAME",
        help="value of the label `node` for this machine's GPUs (default: $RANKSCOPE_NODE, else the host name)",
    )
    dcgm: bool = flag(
        "--metrics.dcgm",
        action="store_true",
        help="also export dcgm-exporter's default metrics, with its names, labels and units (docs/dcgm.md)",
    )
    simulate: str | None = flag(
        "--simulate",
        metavar="N|FILE",
        help="simulate N GPUs that follow the ranks, or the GPUs of a scenario file, without an NVIDIA driver",
    )
    log_level: str = flag("--log.level", choices=LOG_LEVELS, default="info", help="log level (default: %(default)s)")
    log_format: str = flag(
        "--log.format", choices=LOG_FORMATS, default="logfmt", help="log format (default: %(default)s)"
    )

    @property
    def host(self) -> str:
        """Address to listen on; empty for all interfaces, IPv4 and IPv6."""
        return parse_address(self.listen_address)[0]

    @property
    def port(self) -> int:
        """Port to listen on; 0 for any free port."""
        return parse_address(self.listen_address)[1]


# In the order in which --help lists them.
COLLECTOR_FLAGS = (AllocationFlags, RankFlags, NetworkFlags, FindingFlags)


@dataclass(frozen=True, kw_only=True)
class Config(GeneralFlags, AnalyzerFlags, CaptureFlags, AllocationFlags, RankFlags, NetworkFlags, FindingFlags):
    """All settings, validated."""

    collectors: tuple[str, ...]
    """Names of the enabled collectors, in their order."""


def parse(
    collectors: Mapping[str, str],
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
    off: Container[str] = (),
) -> Config:
    """Return the configuration from flags and environment.

    `collectors` maps each collector's name to its one-line help; those in `off` are off by default. Exits with status 2
    and one line on standard error that names the invalid flag.
    """
    parser = make_parser(collectors, off)
    options = vars(parser.parse_args(arguments))
    names = tuple(name for name in collectors if options.pop(f"collector.{name}"))
    options["run_dirs"] = tuple(options["run_dirs"] or default_run_dirs(environment))
    options["node"] = options["node"] or environment.get("RANKSCOPE_NODE", "").strip() or socket.gethostname()
    if not is_name(options["node"]):
        parser.exit(2, f"rankscope-exporter: --node: must be printable text of at most {LABEL_LIMIT} characters\n")
    try:
        parse_address(options["listen_address"])
    except ValueError as error:
        parser.exit(2, f"rankscope-exporter: --web.listen-address: {error}\n")
    if not options["analyze"] and (options["analyze_ca"] or options["analyze_credentials"]):
        parser.exit(2, "rankscope-exporter: --analyze.ca-file and --analyze.basic-auth-file need --analyze\n")
    if options["dcgm"] and "gpu" not in names:
        parser.exit(2, "rankscope-exporter: --metrics.dcgm: needs --collector.gpu, which provides its labels\n")
    return Config(collectors=names, **options)


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`, `[v6]:port` or `:port`. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT or :PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse declares NoReturn; exit() never returns
        """Exit with one line that names the invalid flag and suggests a similar one. Omit the usage."""
        unknown = re.search(r"unrecognized arguments: (--[\w.-]+)", message)
        similar = self._similar_flag(unknown[1]) if unknown else None
        hint = f"did you mean {similar}? " if similar else ""
        self.exit(2, f"{self.prog}: {message} ({hint}see {self.prog} --help)\n")

    def _similar_flag(self, flag: str) -> str | None:
        known = [name for action in self._actions for name in action.option_strings]
        return EQUIVALENT_FLAGS.get(flag) or next(iter(difflib.get_close_matches(flag, known, 1)), None)


def make_parser(collectors: Mapping[str, str], off: Container[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line. `collectors` and `off` are as in `parse`."""
    parser = _Parser(
        prog="rankscope-exporter",
        usage="%(prog)s [FLAG …]",  # argparse's usage would list each collector twice
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"rankscope-exporter {__version__} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=version)
    add_flags(parser, GeneralFlags)
    add_flags(parser.add_argument_group("runs that span nodes"), AnalyzerFlags)
    add_flags(parser.add_argument_group("runs that hang"), CaptureFlags)
    group = parser.add_argument_group("collectors", "--collector.NAME enables one, --no-collector.NAME disables one")
    for flags in COLLECTOR_FLAGS:
        add_flags(group, flags)
    for name, text in collectors.items():
        group.add_argument(
            f"--collector.{name}",
            action=argparse.BooleanOptionalAction,
            default=name not in off,
            help=text if name not in off else f"{text}; off by default",
        )
    return parser
