"""The diagnosis of the node's runs: what its threads share, and its end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread

import pytest
from testing.judged_job import JudgedJob
from testing.simulated_job import lagging

from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks import judged_runs


def test_a_poll_of_the_alignment_does_not_change_what_the_diagnosis_reads(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(20, lagging("data_wait", laggard=1))
    counters = job._alignment.counters
    before = copy.deepcopy(counters)
    assert job.train(5, lagging("data_wait", laggard=1))
    assert counters == before != job._alignment.counters


def test_the_state_is_saved_after_an_update_and_not_during_one(
    run_dir: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judged_runs, "CLOSE_TIMEOUT", 0.01)
    began, may_end = Event(), Event()
    may_end.set()

    def gpus(_at: float) -> Mapping[str, RankGpu]:
        began.set()
        assert may_end.wait(60)
        return {}

    job = JudgedJob(run_dir, gpus=gpus, state_dir=state_dir).trained(12)
    (saved,) = state_dir.iterdir()
    saved.unlink()
    began.clear()
    may_end.clear()
    update = Thread(target=job.diagnosis.update, args=[job.look.scan])
    update.start()
    assert began.wait(60)
    job.diagnosis.close()
    assert not saved.exists()
    may_end.set()
    update.join()
    job.diagnosis.close()
    assert saved.exists()
