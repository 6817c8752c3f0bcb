"""The schedule is reproducible and complete."""

from __future__ import annotations

import re

from deploy.prometheus.shipped import RULES
from testing.job.device import ASYNCHRONOUS
from validation.gauntlet.__main__ import main
from validation.gauntlet.cases import all_cases
from validation.gauntlet.schedule import PAIRS, draw, schedule


def test_a_run_on_the_asynchronous_device_has_a_name_of_its_own():
    assert draw(["drift"], 2).id == "drift/1.4/2"
    assert draw(["drift"], 2, device=ASYNCHRONOUS).id == "drift@asynchronous/1.4/2"
    assert draw(["drift"], 2, device=ASYNCHRONOUS).line()["device"] == ASYNCHRONOUS


def test_a_seed_draws_the_same_runs_in_the_same_order_and_another_seed_another_order():
    assert list(schedule([1])) == list(schedule([1]))
    first, second = list(schedule([1])), list(schedule([2]))
    assert [run.names for run in first] != [run.names for run in second]
    assert {run.names for run in first} == {run.names for run in second}


def test_every_run_has_a_name_of_its_own():
    runs = list(schedule([1, 2, 3], doses=[1.4, 1.15, 2.0]))
    assert len({run.id for run in runs}) == len(runs)


def test_smaller_doses_are_only_for_faults_that_have_doses():
    small = [run for run in schedule([1], doses=[1.4, 1.15]) if run.dose == 1.15]
    assert small
    assert all(run.kind == "fault" and run.cases[0][0].has_doses for run in small)


def test_two_faults_at_once_hit_different_ranks():
    pairs = [run for run in schedule([1, 2, 3]) if run.kind == "pair"]
    assert len(pairs) == 3 * len(PAIRS)
    assert all(run.targets[0].rank != run.targets[1].rank for run in pairs)


def test_the_rules_do_not_name_a_fault():
    fault_names = re.compile("|".join(name for name in all_cases() if name.startswith("f")))
    assert not fault_names.search(RULES.read_text())


def test_an_unknown_case_is_named(capsys, tmp_path):
    assert main(["--only", "f99", "--save", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "gauntlet: --only: no case starts with f99\n"
