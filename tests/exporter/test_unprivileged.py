"""The exporter as a read-only user: it needs no privileges and writes no files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.exporter_process import exporter_process, metrics
from testing.records import living_rank

# Imports come first, because the interpreter may be in a home directory that other users cannot enter. A test run
# without root is already unprivileged. A file size limit of 0 makes every write fail, as on a read-only root file
# system.
UNPRIVILEGED_EXPORTER = """
import os, resource, sys
import anyio._backends._asyncio, encodings.idna, uvicorn.lifespan.on
import uvicorn.loops.uvloop, uvicorn.protocols.http.httptools_impl
import rankscope_exporter.daemon, rankscope_exporter.logs
from rankscope_exporter.__main__ import main
from testing.users import become
if os.geteuid() == 0:
    become(65534)  # the overflow uid of Linux
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
os.chdir("/")
main(sys.argv[1:])
"""


@contextmanager
def unprivileged_exporter(run_dir: Path, port: int) -> Iterator[tuple[str, int]]:
    """Start an exporter. Yields its address and process id."""
    program = (sys.executable, "-c", UNPRIVILEGED_EXPORTER)
    flags = (f"--run-dir={run_dir}", "--simulate=1")
    with exporter_process(port, *flags, program=program, ready="/-/ready") as process:
        yield f"http://127.0.0.1:{port}", process.pid


def test_an_unprivileged_exporter_without_write_access_shows_gpus_and_ranks(run_dir: Path, free_port: int) -> None:
    with living_rank(run_dir):
        pass
    run_dir.chmod(0o555)
    with unprivileged_exporter(run_dir, free_port) as (url, pid):
        lines = metrics(url)
        capabilities = Path(f"/proc/{pid}/status").read_text()
    assert f'rankscope_rank_up{{owner="{os.getuid()}",rank="0",run="r"}} 0.0' in lines
    assert "rankscope_exporter_gpus_seen 1.0" in lines
    assert not [line for line in lines if line.startswith("rankscope_exporter_collector_success") and "} 0" in line]
    assert "CapEff:\t0000000000000000" in capabilities


def test_an_unreadable_record_of_another_user_is_counted(run_dir: Path, free_port: int) -> None:
    run_dir.chmod(0o755)
    (run_dir / "secret.rank").touch(0)
    with unprivileged_exporter(run_dir, free_port) as (url, _):
        assert 'rankscope_exporter_rank_files_skipped{reason="unreadable"} 1.0' in metrics(url)


def test_an_inaccessible_run_directory_is_counted(run_dir: Path, free_port: int) -> None:
    run_dir.chmod(0)
    with unprivileged_exporter(run_dir, free_port) as (url, _):
        assert 'rankscope_exporter_rank_files_skipped{reason="unreadable"} 1.0' in metrics(url)
    run_dir.chmod(0o755)
