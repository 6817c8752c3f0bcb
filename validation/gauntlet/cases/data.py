"""Faults in the data path to the device."""

from __future__ import annotations

from validation.gauntlet.case import Case, alert, all_ranks, drawn_rank, lagging, one_rank

FAULTS = {
    # Data wait is up on every rank, and the loader workers compute.
    "f01_cpu_preprocessing": Case(
        "CPU-heavy preprocessing",
        all_ranks(lambda target: target.preprocessing),
        alert("RankscopeDataBound", "cpu"),
    ),
    # Data wait is up on every rank, and the loader workers are idle: storage is slow.
    "f02_slow_reads": Case(
        "slow remote reads",
        all_ranks(lambda target: {"fetch": target.batch_ms}),
        alert("RankscopeDataBound", "io"),
    ),
    # One rank's data comes late; the others wait for it in the collective.
    "f03_slow_loader": Case(
        "one slow loader",
        one_rank(lambda target: {"fetch": target.batch_ms}),
        lagging("data_wait"),
        drawn_rank,
    ),
    # Copies to the GPU take long on every rank (unpinned memory); the data is there in time.
    "f04_slow_copies": Case(
        "slow host-to-device copies",
        all_ranks(lambda target: {"copy": target.extra_ms}),
        alert("RankscopeCopyBound", "h2d_copy"),
        simulated="the copy is a phase of the script in which it sleeps",
    ),
}
