"""The exporter's configuration: one dataclass, and the only reader of flags and environment.

The flags of a collector are declared next to the collector; `COLLECTOR_FLAGS` lists them.
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
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, SYSTEM_RUN_DIR
from rankscope_exporter.flags import add_flags, flag
from rankscope_exporter.gpu.collectors.allocation import AllocationFlags
from rankscope_exporter.ranks.collectors.alignment import AlignmentFlags
from rankscope_exporter.ranks.collectors.findings import FindingFlags
from rankscope_exporter.ranks.collectors.network import NetworkFlags
from rankscope_exporter.ranks.collectors.ranks import RankFlags

DEFAULT_PORT = 10417
ELSEWHERE = dict.fromkeys(("--port", "--host", "--bind", "--address"), "--web.listen-address=HOST:PORT")
"""What flags of other programs are here."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("logfmt", "json")

DESCRIPTION = """\
Prometheus exporter for GPU training: what every GPU of this machine does (NVML), and what every rank that runs
here does (from the records that the training hook writes). Never touches the job; needs no torch."""

EPILOG = """\
examples:
  rankscope-exporter                                   all GPUs, all ranks, on port 10417
  rankscope-exporter --simulate 8                      no GPU needed: eight simulated ones under the real NVML calls
  rankscope-exporter --no-collector.xid --run-dir /mnt/run
pages: /metrics, /-/healthy, /-/ready, / (status); POST /-/release, /-/resume"""


@dataclass(frozen=True, kw_only=True)
class GeneralFlags:
    """The settings that belong to no collector."""

    listen_address: str = flag(
        "--web.listen-address",
        default=f":{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="where to serve; without a host, every address (default: %(default)s)",
    )
    web_config_file: Path | None = flag(
        "--web.config.file",
        type=Path,
        metavar="FILE",
        help="TLS, client certificates and basic auth, in the format of the Prometheus exporters (docs/security.md)",
    )
    enable_lifecycle: bool = flag(
        "--web.enable-lifecycle",
        action="store_true",
        help="let POST /-/release give the driver's handles back, for a GPU's reset, and /-/resume take them again",
    )
    run_dirs: tuple[Path, ...] = flag(
        "--run-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="where ranks leave their records; may be given more than once "
        f"(default: $RANKSCOPE_RUN_DIR, else {SYSTEM_RUN_DIR} and {SHARED_MEMORY_RUN_DIR})",
    )
    node: str = flag(
        "--node",
        metavar="NAME",
        help="the label `node` of this node's GPUs (default: $RANKSCOPE_NODE, else the host name)",
    )
    dcgm: bool = flag(
        "--metrics.dcgm",
        action="store_true",
        help="serve dcgm-exporter's default counters too, by its names, labels and units (docs/dcgm.md)",
    )
    simulate: str | None = flag(
        "--simulate",
        metavar="N|FILE",
        help="N simulated GPUs that follow the ranks, or those of a scenario file, instead of the NVIDIA driver",
    )
    log_level: str = flag("--log.level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    log_format: str = flag("--log.format", choices=LOG_FORMATS, default="logfmt", help="(default: %(default)s)")

    @property
    def host(self) -> str:
        """Address to listen on; empty is every address, IPv6 and IPv4."""
        return parse_address(self.listen_address)[0]

    @property
    def port(self) -> int:
        """Port to listen on; 0 is any free one."""
        return parse_address(self.listen_address)[1]


# In the order of --help.
COLLECTOR_FLAGS = (AllocationFlags, AlignmentFlags, RankFlags, NetworkFlags, FindingFlags)


@dataclass(frozen=True, kw_only=True)
class Config(GeneralFlags, AllocationFlags, AlignmentFlags, RankFlags, NetworkFlags, FindingFlags):
    """Everything that can be set, validated."""

    collectors: tuple[str, ...]
    """Names of the collectors that are on, in their order."""


def parse(
    collectors: Mapping[str, str],
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
    off: Container[str] = (),
) -> Config:
    """Return the configuration from flags and environment. `collectors` is each collector's name and one-line help.

    The collectors in `off` are off unless a flag says otherwise.

    Exits with status 2 and one line on standard error that names the flag that is wrong.
    """
    parser = make_parser(collectors, off)
    options = vars(parser.parse_args(arguments))
    names = tuple(name for name in collectors if options.pop(f"collector.{name}"))
    options["run_dirs"] = _run_dirs(options["run_dirs"], environment)
    options["node"] = options["node"] or environment.get("RANKSCOPE_NODE", "").strip() or socket.gethostname()
    if not is_name(options["node"]):
        parser.exit(2, f"rankscope-exporter: --node: is not printable text of at most {LABEL_LIMIT} characters\n")
    try:
        parse_address(options["listen_address"])
    except ValueError as error:
        parser.exit(2, f"rankscope-exporter: --web.listen-address: {error}\n")
    if options["dcgm"] and "gpu" not in names:
        parser.exit(2, "rankscope-exporter: --metrics.dcgm: needs --collector.gpu, which its labels come from\n")
    return Config(collectors=names, **options)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[v6]:port` or `:port`. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT or :PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


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


def make_parser(collectors: Mapping[str, str], off: Container[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line; the arguments are those of `parse`."""
    parser = _Parser(
        prog="rankscope-exporter",
        usage="%(prog)s [FLAG …]",  # argparse's own would list each collector twice
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"rankscope-exporter {__version__} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=version)
    add_flags(parser, GeneralFlags)
    group = parser.add_argument_group("collectors", "--no-collector.NAME switches one off, --collector.NAME one on")
    for flags in COLLECTOR_FLAGS:
        add_flags(group, flags)
    for name, text in collectors.items():
        group.add_argument(
            f"--collector.{name}",
            action=argparse.BooleanOptionalAction,
            default=name not in off,
            help=text if name not in off else f"{text}; off unless asked for",
        )
    return parser
