"""One set of labels a GPU, whoever and however many hold it."""

from __future__ import annotations

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


def test_what_is_too_long_or_not_printable_is_left_out() -> None:
    assert known(Holder("slurm", slurm_job_id="7", slurm_job_name="a\nb", user="u" * 201)) == {
        "source": "slurm",
        "slurm_job_id": "7",
    }


def test_a_crowd_is_cut_off_visibly() -> None:
    crowd = [Holder("rank", rank=str(rank)) for rank in range(64)]
    assert known(*crowd)["rank"].split(",") == [*map(str, range(16)), "…"]
