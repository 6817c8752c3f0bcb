"""`rankscope explain`, run in this process."""

from __future__ import annotations

import pytest

from rankscope.cli import launch


def explain(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        launch.main(["explain", *flags])
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


def complaint(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the line of the error, without the command's name."""
    code, out, err = explain(capsys, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err[:-1].isprintable()
    return err.removeprefix("rankscope explain: ").rstrip()
