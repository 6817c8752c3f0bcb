"""An error of ours never reaches the training loop: the probe that made it is logged once and switched off.

Only our own code is guarded, never the host's call. Tests set `reraise` to see the errors that this hides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

logger = logging.getLogger("rankscope")
reraise = False


class Guard:
    """The fuse of one probe. `on_failure` is called once, with the probe's name, after it blew.

    Ctrl-C within our code is the host's, and passes; `on_interrupt` is called before, as it leaves a probe half-way.
    """

    def __init__(
        self, probe: str, on_failure: Callable[[str], None], on_interrupt: Callable[[], None] = lambda: None
    ) -> None:
        self.probe = probe
        self.blown = False
        self._on_failure = on_failure
        self._on_interrupt = on_interrupt

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
        """`function`, but returning None instead of raising, and no longer called once the fuse has blown.

        Around it goes a frame of 80 ns. So what runs several times a step guards itself, with what `guarded` has.
        """

        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
            if self.blown:
                return None
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # the whole point: nothing of ours may reach the host
                self.blow(error)
                return None

        return guarded

    def __reduce__(self) -> tuple[Any, ...]:
        """A stand-in that is switched off and needs none of us: cloudpickle sends a class of `__main__` by value, with
        what we have put on it, perhaps to a process without Rankscope.
        """
        return SimpleNamespace, (), {"blown": True}

    def blow(self, error: BaseException) -> None:
        """Switch the probe off because of `error`, which is being handled; unless it is none of ours, as Ctrl-C."""
        if not isinstance(error, Exception):
            self._on_interrupt()
            try:
                raise error
            finally:
                del error  # or the exception, through its traceback, would keep the job's objects until it is collected
        if reraise:
            raise error
        if self.blown:
            return
        self.blown = True
        message = "rankscope: probe %s failed and is off for the rest of the run; training is not affected: %s"
        logger.warning(message, self.probe, error, exc_info=error)
        try:
            self._on_failure(self.probe)
        except Exception:
            logger.debug("rankscope: the record could not say so", exc_info=True)
