"""The command `rankscope-exporter`: checks the installed packages, reads the configuration, runs the daemon."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

# Import names of the packages that `rankscope[exporter]` installs and `rankscope` does not.
REQUIRED = ("pynvml", "prometheus_client", "fastapi", "uvicorn", "httptools", "uvloop", "yaml", "bcrypt")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Exits with status 2 and one line on standard error if it cannot start."""
    if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
        message = f"{', '.join(missing)} missing; install with: pip install 'rankscope[exporter]'"
        sys.exit(_report_error(message))
    from rankscope_exporter import config, logs
    from rankscope_exporter.daemon import run
    from rankscope_exporter.node import StartError
    from rankscope_exporter.registry import HELP, OFF_BY_DEFAULT

    settings = config.parse(HELP, arguments, off=OFF_BY_DEFAULT)
    logs.configure(settings.log_level, settings.log_format)
    try:
        run(settings)
    except StartError as error:
        sys.exit(_report_error(str(error)))


def _report_error(text: str) -> int:
    sys.stderr.write(f"rankscope-exporter: {text}\n")
    return 2


if __name__ == "__main__":
    main()
