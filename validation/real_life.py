"""Run the tests of cases from bug reports, real training programs and nodes with several users (`make real-life`).

    python -m validation.real_life --save

Each case is the behavior that a user expects, in several variants. A case holds if none of its tests fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from testing import report

ROOT = Path(__file__).resolve().parents[1]


class Case(NamedTuple):
    """An observation, and its tests: those of a function, or of a whole file below tests/."""

    seen: str
    file: str
    function: str = ""

    @property
    def node(self) -> str:
        """The tests' name in pytest, without their parameters."""
        return f"tests/{self.file}.py" + (f"::{self.function}" if self.function else "")


CASES = {
    "drivers": (
        Case(
            "sample stamps are by the boot clock, or one second apart",
            "exporter/gpu/test_busy_meter",
            "test_a_busy_gpu_is_busy_now_for_any_clock_of_the_stamps",
        ),
        Case(
            "the node's clock is set forward",
            "exporter/gpu/test_busy_meter",
            "test_setting_the_clock_loses_at_most_one_period",
        ),
        Case(
            "the driver keeps no samples while the GPU is idle",
            "exporter/gpu/test_busy_meter",
            "test_bursts_count_with_their_duration_if_idle_gpus_have_no_samples",
        ),
        Case(
            "rings run dry, are emptied, overflow, jump",
            "exporter/gpu/test_busy_meter",
            "test_each_sample_of_the_ring_is_counted_once",
        ),
        Case(
            "two GPUs have one UUID",
            "exporter/gpu/test_sampler",
            "test_gpus_with_the_same_uuid_are_exported_separately",
        ),
        Case(
            "a GPU's name is not UTF-8", "exporter/gpu/test_sampler", "test_text_that_is_not_utf_8_fails_no_collector"
        ),
    ),
    "training": (
        Case(
            "the script gives step() a number of any type",
            "trainer_hooks/test_script",
            "test_a_finite_number_of_any_type_is_counted",
        ),
        Case(
            "a batch is a nested tensor",
            "trainer_hooks/probes/test_batch_size",
            "test_the_samples_of_a_nested_tensor_are_its_components",
        ),
        Case(
            "a batch is a list of dicts, ragged, packed, an object",
            "trainer_hooks/probes/test_samples",
            "test_a_loader_counts_the_samples_that_it_requests_whatever_the_batch_is",
        ),
        Case(
            "batches are skipped at a resume",
            "trainer_hooks/probes/test_samples",
            "test_skipped_batches_do_not_count",
        ),
        Case(
            "a batch is only looked at",
            "trainer_hooks/probes/test_samples",
            "test_a_batch_without_a_backward_pass_does_not_count",
        ),
        Case(
            "a loop breaks off",
            "trainer_hooks/probes/test_samples",
            "test_a_loop_with_a_break_leaves_no_batch_behind",
        ),
        Case(
            "batches are seen by an evaluation",
            "trainer_hooks/probes/test_samples",
            "test_batches_fetched_in_evaluation_mode_do_not_count",
        ),
        Case("ranks of one tensor-parallel group share their batches", "trainer_hooks/probes/test_shared_batches"),
        Case("Accelerate dispatches batches from rank 0", "trainer_hooks/probes/test_dispatched_batches"),
        Case("one optimizer steps after another", "trainer_hooks/timeline/test_turns"),
        Case(
            "two optimizers alternate",
            "trainer_hooks/timeline/test_turns",
            "test_a_generator_and_its_critic_count_once_per_round",
        ),
        Case("several models are updated by hand in turn", "trainer_hooks/timeline/test_steps_by_hand"),
        Case("workers are forked after training, ranks change at a restart", "trainer_hooks/process/test_other_ranks"),
        Case("os._exit(0), sys.exit(1), an error reported to torchrun", "trainer_hooks/process/test_endings"),
        Case(
            "Ray Train kills workers that left their group",
            "trainer_hooks/process/test_endings",
            "test_a_rank_that_left_its_group_has_finished_unless_it_continues",
        ),
        Case("a job closes its descriptors or becomes a daemon", "trainer_hooks/process/test_descriptors"),
        Case("a rank loses its lock", "exporter/ranks/test_lost_locks"),
        Case("timed() is given a generator", "trainer_hooks/probes/test_timed_iterator"),
        Case(
            "a phase's name is empty, long, of other scripts",
            "trainer_hooks/test_script",
            "test_the_time_of_a_refused_name_is_other_and_logged_once",
        ),
        Case(
            "a run is named -c",
            "trainer_hooks/test_announcements",
            "test_the_parser_accepts_the_printed_command",
        ),
        Case("a rank is hidden for any reason", "rules/test_hidden_ranks"),
    ),
    "real repositories": (
        Case("replicate() and methods prepare DDP's reducer", "trainer_hooks/timeline/test_exposed_wait"),
        Case(
            "a loader's workers start at each epoch",
            "trainer_hooks/probes/test_data_wait",
            "test_the_start_of_a_loader_is_data_wait",
        ),
        Case(
            "a loader's workers end at each epoch",
            "trainer_hooks/probes/test_loader_workers",
            "test_the_shutdown_of_a_loaders_workers_is_data_wait",
        ),
        Case(
            "torchdata's StatefulDataLoader",
            "trainer_hooks/probes/test_loader_workers",
            "test_the_workers_of_a_stateful_loader_count_as_torchs_do",
        ),
        Case(
            "a plain loop validates its model",
            "trainer_hooks/probes/test_forward",
            "test_passes_without_gradients_in_evaluation_mode_are_evaluation",
        ),
        Case(
            "rank 0 validates DDP's inner module",
            "trainer_hooks/probes/test_forward",
            "test_evaluation_with_the_module_in_ddp_is_evaluation",
        ),
        Case(
            "a frozen teacher works for each step",
            "trainer_hooks/probes/test_forward",
            "test_a_teacher_that_never_trains_is_forward",
        ),
        Case(
            "a checkpoint is saved into memory",
            "trainer_hooks/probes/test_checkpoint",
            "test_a_checkpoint_written_from_memory_counts_once",
        ),
    ),
    "clusters": (
        Case("pods are on MIG devices of the kubelet", "exporter/gpu/allocation/test_pod_resources"),
        Case("containers in any grammar of cgroups", "exporter/gpu/allocation/test_cgroups"),
        Case("a web configuration of exporter-toolkit", "exporter/web/test_config_file"),
        Case("pods serve inferences between pauses", "validation/test_serving_pods"),
    ),
    "the first hour": (
        Case("faults return, follow each other, flap", "rules/test_notifications"),
        Case("a run's name has Slack's markup", "rules/test_slack"),
    ),
    "other users and clocks": (
        Case("a client keeps the backlog full", "attacks/http/test_churn"),
        Case("requests do not end, also over TLS", "attacks/http/test_endless_requests"),
        Case("a process is 128 ranks with 1,500 children", "exporter/ranks/test_rank_processes"),
        Case("a run has a new name each second", "exporter/ranks/test_new_series"),
        Case("the node's clock is wrong, then set right", "exporter/ranks/test_clock_steps"),
        Case("any user may fill the run directory", "deploy/test_run_directory_mount"),
        Case(
            "any user may try to block a prolog",
            "deploy/test_slurm",
            "test_no_other_user_can_open_the_lock_to_block_a_prolog",
        ),
        Case(
            "a record claims a GPU that the node lacks",
            "exporter/gpu/allocation/test_occupants",
            "test_a_gpu_that_the_node_lacks_contradicts_a_claim",
        ),
        Case(
            "a run has no name",
            "attacks/ranks/test_forged_runs",
            "test_a_rank_of_a_run_without_a_name_is_counted_and_not_shown",
        ),
    ),
}


class Outcomes:
    """A plugin of pytest that counts how the tests of each case ended."""

    def __init__(self) -> None:
        self.of: Counter[tuple[str, str]] = Counter()  # by the test without its parameters, and its outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that ran, failed before or after it ran, or was skipped."""
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid.partition("[")[0], report.outcome] += 1

    def number(self, case: Case, outcome: str) -> int:
        """Return how many tests of the case had this outcome."""
        return sum(n for (test, ended), n in self.of.items() if ended == outcome and test.startswith(case.node))


def rows(outcomes: Outcomes) -> list[tuple[str, str, str, int]]:
    """Return where each case was seen, what was seen, whether it holds, and how many of its tests passed."""
    found = []
    for where, cases in CASES.items():
        for case in cases:
            passed, failed = (outcomes.number(case, outcome) for outcome in ("passed", "failed"))
            found.append((where, case.seen, report.yes_or_no(passed > 0 and not failed), passed))
    return found


def main() -> int:
    """Run the tests and publish. Return 1 if a case does not hold."""
    options = report.parser(__doc__, prog="make real-life").parse_args()
    outcomes = Outcomes()
    nodes = sorted({str(ROOT / case.node) for cases in CASES.values() for case in cases})
    pytest.main(["-q", "--rootdir", str(ROOT), "-p", "no:xdist", *nodes], plugins=[outcomes])
    found = rows(outcomes)
    body = [report.table(("seen in", "what was seen", "held", "tests"), found)]
    figures = [dict(zip(("where", "seen", "held", "tests"), row, strict=True)) for row in found]
    report.Report("real_life", "Seen in real life", __doc__, "every case is held", body, figures).publish(options.save)
    return 0 if all(held == report.yes_or_no(True) for _, _, held, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
