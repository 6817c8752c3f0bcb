"""Keeps errors of the hook from the training loop: an error costs one call, a series of them disables the probe.

Only the hook's own code is guarded, never the job's call. Tests set `reraise` to see these errors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# So many errors in so many seconds disable a probe: its numbers are wrong, its tracebacks costly.
MOST_ERRORS, WINDOW = 8, 600.0

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
        self._errors: deque[float] = deque(maxlen=MOST_ERRORS)  # monotonic times
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
                self.handle(error)
                return None

        return guarded

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a disabled stand-in without Rankscope: cloudpickle sends a patched class of `__main__` by value,
        perhaps to a process that does not have Rankscope.
        """
        return SimpleNamespace, (), {"disabled": True}

    def handle(self, error: BaseException) -> None:
        """Handle an error of one call, which is not counted; after a series of them, disable the probe."""
        if self._must_raise(error):
            try:
                raise error
            finally:
                del error  # its traceback would keep the job's objects alive until a garbage collection
        if self.disabled:
            return
        is_first = not self._errors
        self._errors.append(now := time.monotonic())
        if len(self._errors) == MOST_ERRORS and now - self._errors[0] <= WINDOW:
            self.disable(error)
        elif is_first:
            message = "rankscope: probe %s failed in one call, which does not count; training is not affected: %s"
            logger.warning(message, self.probe, error, exc_info=error)

    def disable(self, error: BaseException) -> None:
        """Disable the probe because of `error`, which is being handled."""
        if self._must_raise(error):
            try:
                raise error
            finally:
                del error  # as above
        self.disabled = True
        message = "rankscope: probe %s failed; disabled for the rest of the run, training is not affected: %s"
        logger.warning(message, self.probe, error, exc_info=error)
        self._note_failure()

    def _must_raise(self, error: BaseException) -> bool:
        """Return whether this is Ctrl-C or another non-error, after cleaning up for it, or a test raises all errors."""
        if not isinstance(error, Exception):
            self._on_interrupt()
            return True
        return reraise

    def _note_failure(self) -> None:
        try:
            self._on_failure(self.probe)
        except Exception:
            logger.debug("rankscope: cannot note the disabled probe in the record", exc_info=True)
