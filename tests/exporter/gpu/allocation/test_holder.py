"""A GPU has one set of labels, for any number of holders."""

from __future__ import annotations

import pytest

from rankscope_exporter.gpu.allocation.holder import LABELS, Holder, labels


def known(*holders: Holder) -> dict[str, str]:
    found = labels(holders)
    assert tuple(found) == LABELS, "the metric's label order"
    return {name: value for name, value in found.items() if value}


def test_labels_combine_all_sources() -> None:
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


def test_several_holders_share_a_label_sorted_and_distinct() -> None:
    ranks = [Holder("rank", run="train", rank=rank) for rank in ("10", "2", "2")]
    assert known(*ranks) == {"source": "rank", "run": "train", "rank": "2,10"}


def test_the_schedulers_user_takes_precedence() -> None:
    assert known(Holder("container", user="root"), Holder("slurm", user="alice"))["user"] == "alice"


def test_a_job_has_its_number_or_its_sluid_if_no_number_is_known() -> None:
    by_prolog, by_cgroup = Holder("slurm", slurm_job_id="7"), Holder("slurm", slurm_job_id="sF9EPK6QCKG300")
    assert known(by_prolog, by_cgroup)["slurm_job_id"] == "7"
    assert known(by_cgroup)["slurm_job_id"] == "sF9EPK6QCKG300"


def test_a_number_and_its_sluid_are_one_job_and_other_sluids_are_separate() -> None:
    by_prolog = Holder("slurm", slurm_job_id="7", sluid="sF9EPK6QCKG300")
    by_cgroup, other = Holder("slurm", slurm_job_id="sF9EPK6QCKG300"), Holder("slurm", slurm_job_id="sF9EPK6QCKG400")
    assert known(by_prolog, by_cgroup)["slurm_job_id"] == "7"
    assert known(by_prolog, by_cgroup, other)["slurm_job_id"] == "sF9EPK6QCKG400,7"


def rank_holder(job: str = "7", sluid: str = "", uid: str = "1000", name: str = "train") -> Holder:
    """Return the holder for a rank with this job."""
    return Holder("rank", slurm_job_id=job, sluid=sluid, slurm_job_name=name, uid=uid)


@pytest.mark.parametrize(
    "job",
    [
        Holder("slurm", slurm_job_id="7", uid="1000"),
        Holder("slurm", slurm_job_id="7", sluid="sF9EPK6QCKG300", uid="1000"),
    ],
)
def test_a_rank_names_a_job_of_its_owner_on_the_gpu(job: Holder) -> None:
    assert known(job, rank_holder())["slurm_job_name"] == "train"


def test_without_a_prolog_a_rank_names_the_job_of_its_owners_process() -> None:
    process = Holder("slurm", slurm_job_id="sF9EPK6QCKG300", uid="1000")
    labels = known(process, rank_holder(sluid="sF9EPK6QCKG300"))
    assert (labels["slurm_job_id"], labels["slurm_job_name"]) == ("sF9EPK6QCKG300", "train"), "the number is unknown"


@pytest.mark.parametrize(
    "holders",
    [
        [rank_holder()],
        [Holder("slurm", slurm_job_id="7", uid="1001"), rank_holder()],
        [Holder("slurm", slurm_job_id="8", uid="1000"), rank_holder()],
        [Holder("slurm", slurm_job_id="7", user="alice"), rank_holder(uid="")],
        [Holder("user", uid="1000"), rank_holder()],
        [Holder("slurm", slurm_job_id="8", uid="1000"), Holder("slurm", slurm_job_id="7", uid="1001"), rank_holder()],
    ],
    ids=["no job", "other user's job", "other job", "unknown user", "process outside jobs", "shared GPU"],
)
def test_a_rank_cannot_name_another_users_job(holders: list[Holder]) -> None:
    assert "slurm_job_name" not in known(*holders)


def test_values_that_are_too_long_or_not_printable_are_omitted() -> None:
    assert known(Holder("slurm", slurm_job_id="7", slurm_job_name="a\nb", user="u" * 201)) == {
        "source": "slurm",
        "slurm_job_id": "7",
    }


def test_excess_values_are_truncated_with_an_ellipsis() -> None:
    ranks = [Holder("rank", rank=str(rank)) for rank in range(64)]
    assert known(*ranks)["rank"].split(",") == [*map(str, range(16)), "…"]
