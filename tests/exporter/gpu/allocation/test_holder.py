"""One set of labels a GPU, whoever and however many hold it."""

from __future__ import annotations

import pytest

from rankscope_exporter.gpu.allocation.holder import LABELS, Holder, labels


def known(*holders: Holder) -> dict[str, str]:
    found = labels(holders)
    assert tuple(found) == LABELS, "in one order, as the metric names them"
    return {name: value for name, value in found.items() if value}


def test_what_every_source_knows_stands_together() -> None:
    assert known(
        Holder("user", user="alice"),
        Holder("slurm", slurm_job_id="7", slurm_job_name="train"),
        Holder("rank", run="train-7", rank="3"),
    ) == {
        "source": "slurm",
        "slurm_job_id": "7",
        "slurm_job_name": "train",
        "user": "alice",
        "run": "train-7",
        "rank": "3",
    }


def test_several_holders_stand_in_one_label_each_once_and_in_order() -> None:
    ranks = [Holder("rank", run="train", rank=rank) for rank in ("10", "2", "2")]
    assert known(*ranks) == {"source": "rank", "run": "train", "rank": "2,10"}


def test_the_scheduler_says_who_the_user_is() -> None:
    assert known(Holder("container", user="root"), Holder("slurm", user="alice"))["user"] == "alice"


def test_a_job_is_named_by_its_number_and_by_its_sluid_only_where_no_number_is_known() -> None:
    by_prolog, by_cgroup = Holder("slurm", slurm_job_id="7"), Holder("slurm", slurm_job_id="sF9EPK6QCKG300")
    assert known(by_prolog, by_cgroup)["slurm_job_id"] == "7"
    assert known(by_cgroup)["slurm_job_id"] == "sF9EPK6QCKG300"


def test_a_number_and_its_sluid_are_one_job_and_another_sluid_another() -> None:
    by_prolog = Holder("slurm", slurm_job_id="7", sluid="sF9EPK6QCKG300")
    by_cgroup, other = Holder("slurm", slurm_job_id="sF9EPK6QCKG300"), Holder("slurm", slurm_job_id="sF9EPK6QCKG400")
    assert known(by_prolog, by_cgroup)["slurm_job_id"] == "7"
    assert known(by_prolog, by_cgroup, other)["slurm_job_id"] == "sF9EPK6QCKG400,7"


def says(job: str = "7", sluid: str = "", uid: str = "1000", name: str = "train") -> Holder:
    """What a rank says of its job."""
    return Holder("rank", slurm_job_id=job, sluid=sluid, slurm_job_name=name, uid=uid)


@pytest.mark.parametrize(
    "job",
    [
        Holder("slurm", slurm_job_id="7", uid="1000"),
        Holder("slurm", slurm_job_id="7", sluid="sF9EPK6QCKG300", uid="1000"),
    ],
)
def test_a_rank_names_the_job_that_its_owner_has_on_the_gpu(job: Holder) -> None:
    assert known(job, says())["slurm_job_name"] == "train"


def test_without_a_prolog_a_rank_names_the_job_in_whose_cgroup_its_owners_process_is() -> None:
    process = Holder("slurm", slurm_job_id="sF9EPK6QCKG300", uid="1000")
    labels = known(process, says(sluid="sF9EPK6QCKG300"))
    assert (labels["slurm_job_id"], labels["slurm_job_name"]) == ("sF9EPK6QCKG300", "train"), "it claims no number"


@pytest.mark.parametrize(
    "holders",
    [
        [says()],
        [Holder("slurm", slurm_job_id="7", uid="1001"), says()],
        [Holder("slurm", slurm_job_id="8", uid="1000"), says()],
        [Holder("slurm", slurm_job_id="7", user="alice"), says(uid="")],
        [Holder("user", uid="1000"), says()],
        [Holder("slurm", slurm_job_id="8", uid="1000"), Holder("slurm", slurm_job_id="7", uid="1001"), says()],
    ],
    ids=["no job", "another user's", "another job", "of no known user", "a process outside of jobs", "a shared GPU"],
)
def test_no_rank_names_another_users_job(holders: list[Holder]) -> None:
    assert "slurm_job_name" not in known(*holders)


def test_what_is_too_long_or_not_printable_is_left_out() -> None:
    assert known(Holder("slurm", slurm_job_id="7", slurm_job_name="a\nb", user="u" * 201)) == {
        "source": "slurm",
        "slurm_job_id": "7",
    }


def test_a_crowd_is_cut_off_visibly() -> None:
    crowd = [Holder("rank", rank=str(rank)) for rank in range(64)]
    assert known(*crowd)["rank"].split(",") == [*map(str, range(16)), "…"]
