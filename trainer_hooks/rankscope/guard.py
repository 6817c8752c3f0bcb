"""Keeps errors of the hook from the training loop: it logs a failed probe once and disables it.

Only the hook's own code is guarded, never the job's call. Tests set `reraise` to see these errors.
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
    """The guard of one probe. `on_failure` is called once, with the probe's name, after the probe is disabled.

    Ctrl-C inside the hook's code is raised to the job; `on_interrupt` is called first, to clean up the probe.
    """

    def __init__(
        self, probe: str, on_failure: Callable[[str], None], on_interrupt: Callable[[], None] = lambda: None
    ) -> None:
        self.probe = probe
        self.disabled = False
        self._on_failure = on_failure
        self._on_interrupt = on_interrupt

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
        """Wrap `function` so that it returns None instead of raising, and is not called once the probe is disabled.

        The extra frame costs 80 ns. Code that runs several times a step has the body of `guarded` inline instead.
        """

        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
            if self.disabled:
                return None
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # no error of the hook may reach the job
                self.disable(error)
                return None

        return guarded

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a disabled stand-in without Rankscope: cloudpickle sends a patched class of `__main__` by value,
        perhaps to a process that does not have Rankscope.
        """
        return SimpleNamespace, (), {"disabled": True}

    def disable(self, error: BaseException) -> None:
        """Disable the probe because of `error`, which is being handled. Raises Ctrl-C and other non-errors again."""
        if not isinstance(error, Exception):
            self._on_interrupt()
            try:
                raise error
            finally:
                del error  # its traceback would keep the job's objects alive until a garbage collection
        if reraise:
            raise error
        if self.disabled:
            return
        self.disabled = True
        message = "rankscope: probe %s failed; disabled for the rest of the run, training is not affected: %s"
        logger.warning(message, self.probe, error, exc_info=error)
        try:
            self._on_failure(self.probe)
        except Exception:
            logger.debug("rankscope: cannot note the disabled probe in the record", exc_info=True)
