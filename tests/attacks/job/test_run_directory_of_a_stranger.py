"""Attacks: a run directory that is another user's or their link, and one where any user can remove records."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.attacks.job.jobs import train
from tests.attacks.users import MALLORY, needs_root

import rankscope
from rankscope.record import writer

pytestmark = [needs_root, pytest.mark.usefixtures("guest")]


@pytest.fixture
def target(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory, and a link to it as the job's run directory."""
    target = run_dir / "target"
    target.mkdir()
    (run_dir / "link").symlink_to(target)
    monkeypatch.setenv("RANKSCOPE_RUN_DIR", str(run_dir / "link"))
    return target


def give_to_attacker(path: Path) -> None:
    os.chown(path, MALLORY, MALLORY, follow_symlinks=False)


def test_another_users_link_is_not_followed_and_the_job_continues(
    target: Path, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train()
    give_to_attacker(run_dir / "link")
    rankscope.instrument()
    assert train() == expected
    assert list(target.iterdir()) == []
    (warning,) = caplog.messages
    assert "RANKSCOPE_RUN_DIR: the run directory is a link that another user made" in warning


def test_the_users_own_link_is_followed(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    rankscope.instrument()
    train()
    assert len(list(target.iterdir())) == 1
    assert caplog.messages == []


def test_a_link_made_during_the_creation_of_the_fallback_does_not_make_its_target_writable(
    target: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fallback, mkdir = run_dir / "fallback", Path.mkdir

    def attacked(path: Path, *arguments: object, **options: object) -> None:
        fallback.symlink_to(target)
        give_to_attacker(fallback)
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(writer, "SYSTEM_RUN_DIR", run_dir / "none")
    monkeypatch.setattr(writer, "SHARED_MEMORY_RUN_DIR", fallback)
    monkeypatch.delenv("RANKSCOPE_RUN_DIR")
    monkeypatch.setattr(Path, "mkdir", attacked)
    before = stat.S_IMODE(target.stat().st_mode)
    rankscope.instrument()
    train()
    assert stat.S_IMODE(target.stat().st_mode) == before
    assert list(target.iterdir()) == []
    assert "is a link that another user made" in caplog.text


def test_all_users_can_use_the_fallback_but_not_remove_the_records_of_others(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "SYSTEM_RUN_DIR", run_dir / "none")
    monkeypatch.setattr(writer, "SHARED_MEMORY_RUN_DIR", run_dir / "fallback")
    monkeypatch.delenv("RANKSCOPE_RUN_DIR")
    rankscope.instrument()
    train()
    assert stat.S_IMODE((run_dir / "fallback").stat().st_mode) == 0o1777
    assert len(list((run_dir / "fallback").iterdir())) == 1
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("owner", "mode", "warning"),
    [
        (MALLORY, 0o1777, f"belongs to another user ({MALLORY})"),
        (0, 0o777, "is world-writable but not sticky"),
        (0, 0o1777, None),
        (65534, 0o1777, None),  # root's, in a container with a user namespace
        (0, 0o2770, None),  # for a group, whose users trust each other
    ],
)
def test_a_directory_where_other_users_can_remove_records_is_used_with_one_warning(
    run_dir: Path, owner: int, mode: int, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.chmod(mode)
    os.chown(run_dir, owner, owner)
    rankscope.instrument()
    train()
    assert len(list(run_dir.iterdir())) == 1
    assert len(caplog.messages) == (warning is not None)
    assert (warning or "") in caplog.text
    assert warning is None or str(run_dir) in caplog.text


def test_only_one_rank_of_a_node_warns_about_the_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.chmod(0o777)
    monkeypatch.setenv("LOCAL_RANK", "1")
    rankscope.instrument()
    train()
    assert caplog.messages == []
