"""An announced process holds a simulated GPU's memory while it is alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rankscope_exporter.simulation.hold import main
from rankscope_exporter.simulation.holders import HolderDirectory, announced
from rankscope_exporter.simulation.timeline import SimulatedProcess

GIB = 2**30


def test_an_announced_process_holds_memory_of_its_gpu_only(tmp_path):
    holders = HolderDirectory(tmp_path / "created on demand")
    assert holders.find(2) == []
    with announced(tmp_path / "created on demand", 2, "20 GiB"):
        assert holders.find(2) == [SimulatedProcess(os.getpid(), 20 * GIB)]
        assert holders.find(0) == []
    assert holders.find(2) == []


def test_a_process_that_died_without_withdrawing_holds_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / f"{process.pid}.yml").write_text("gpu: 0\nmemory: 1 GiB\n")
    assert HolderDirectory(tmp_path).find(0) == []


@pytest.mark.parametrize("content", ["", "gpu: two\nmemory: 1", "gpu: 0\nmemory: much", "gpu: [", "gpu: 0\nmmemory: 1"])
def test_an_invalid_announcement_is_logged_once(tmp_path, caplog, content):
    (tmp_path / f"{os.getpid()}.yml").write_text(content)
    holders = HolderDirectory(tmp_path)
    assert holders.find(0) == holders.find(0) == []
    assert [record.message for record in caplog.records] == [caplog.records[0].message]
    assert f"{os.getpid()}.yml" in caplog.text


def test_other_files_are_ignored(tmp_path):
    (tmp_path / "notes.yml").write_text("gpu: 0\nmemory: 1 GiB\n")
    (tmp_path / "5.draft").write_text("gpu: 0\nmemory: 1 GiB\n")
    assert HolderDirectory(tmp_path).find(0) == []


def test_a_rewritten_announcement_is_read_again(tmp_path):
    holders = HolderDirectory(tmp_path)
    path = tmp_path / f"{os.getpid()}.yml"
    path.write_text("gpu: 0\nmemory: 1 GiB\n")
    assert [process.memory for process in holders.find(0)] == [GIB]
    path.write_text("gpu: 0\nmemory: 2 GiB\n")
    os.utime(path, ns=(0, 12345))
    assert [process.memory for process in holders.find(0)] == [2 * GIB]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_command_holds_memory_until_a_signal(tmp_path, stop):
    command = ["-m", "rankscope_exporter.simulation.hold", "--dir", str(tmp_path), "--gpu", "1", "--memory", "3GiB"]
    process = subprocess.Popen([sys.executable, *command])
    holders = HolderDirectory(tmp_path)
    while not holders.find(1):
        assert process.poll() is None
        time.sleep(0.02)
    assert holders.find(1) == [SimulatedProcess(process.pid, 3 * GIB)]
    process.send_signal(stop)
    assert process.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_created_is_named_and_signals_are_unblocked(tmp_path, capsys):
    (tmp_path / "file").touch()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert main(["--dir", str(tmp_path / "file"), "--gpu", "1", "--memory", "1GiB"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_the_command_names_an_invalid_argument(tmp_path, capsys):
    assert main(["--dir", str(tmp_path), "--gpu", "1", "--memory", "lots"]) == 2
    assert capsys.readouterr().err == "hold: --memory: 'lots' is not a size, such as 20 GiB or a number of bytes\n"
