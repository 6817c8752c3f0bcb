"""Finding this rank's run in the experiment tracker that the job uses: W&B, MLflow or TensorBoard.

Only modules in `sys.modules` are used: nothing is imported, and nothing is requested over the network. A tracker may
start long after the hook, so this looks again every ten seconds. Objects that their library does not list are noted
when the job logs with them.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rankscope.guard import Guard, logger
from rankscope.patch import Patches
from rankscope.record import layout
from rankscope.record.text import LABEL_LIMIT, is_link, replace_unprintable, without_credentials

INTERVAL = 10.0  # seconds
Figures = Mapping[str, "str | float"]


class TrackerRun(NamedTuple):
    """A run of a tracker. `url` is called once for each run. `write` adds figures to the run's summary."""

    id: str
    url: Callable[[], str]
    write: Callable[[Figures], object] | None = None
    source: Any = None  # W&B's object of the run


class Watched(NamedTuple):
    """A method that the job calls to log with an object of this class."""

    tracker: str
    module: str
    owner: str
    method: str


WATCHED = (
    Watched("tensorboard", "torch.utils.tensorboard.writer", "SummaryWriter", "_get_file_writer"),
    Watched("tensorboard", "tensorboardX.writer", "SummaryWriter", "_get_file_writer"),
    # It logs with its own client, without an active run of MLflow.
    Watched("mlflow", "lightning.pytorch.loggers.mlflow", "MLFlowLogger", "log_metrics"),
    Watched("mlflow", "pytorch_lightning.loggers.mlflow", "MLFlowLogger", "log_metrics"),
    # Runs of `wandb.init(reinit="create_new")` are not in `wandb.run`.
    Watched("wandb", "wandb.sdk.wandb_run", "Run", "log"),
)


class Trackers:
    """The runs of the trackers: `ids` and `urls` by tracker. `on_change` is called when they have changed."""

    def __init__(
        self,
        guard: Guard,
        on_change: Callable[[], object],
        on_run: Callable[[str, TrackerRun], object] = lambda _tracker, _run: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without runs. `on_run` is called with each run that is found."""
        self._on_change = on_change
        self._on_run = on_run
        self._clock = clock
        self._note = guard(self._note_object)
        self._objects: dict[str, weakref.ref[Any]] = {}  # with which the job logs, one per tracker
        self._patches = Patches()
        self.remove = self._patches.undo
        self.restart()

    def restart(self) -> None:
        """Forget the runs of the rank that this process was before."""
        self.ids: dict[str, str] = {}
        self.urls: dict[str, str] = {}
        self._last: dict[str, str] = {}  # the trackers' own ids
        self._objects.clear()
        self._next = 0.0

    def poll(self) -> None:
        """Look for runs if that is due."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL
        for watched in WATCHED:
            owner = _loaded(watched.module, watched.owner)
            if hasattr(owner, watched.method):
                self._patches.add(owner, watched.method, self._wrap_log(watched.tracker))
        for tracker in layout.TRACKERS:
            self._look_for(tracker)

    def _look_for(self, tracker: str) -> None:
        try:
            run = FINDERS[tracker](self._object(tracker))
            if run is None or run.id == self._last.get(tracker):
                return
            url = run.url()
        except Exception:  # a tracker may raise anything
            logger.debug("rankscope: cannot find the run of %s", tracker, exc_info=True)
            return
        self._last[tracker] = run.id
        # The end of a path is more specific than its start.
        self.ids[tracker] = replace_unprintable(without_credentials(run.id)[-LABEL_LIMIT:])
        self.urls[tracker] = url if is_link(url) else ""
        self._on_run(tracker, run)
        self._on_change()

    def _wrap_log(self, tracker: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        objects, note = self._objects, self._note

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def watched(instance: Any, *args: Any, **kwargs: Any) -> Any:
                if tracker not in objects:
                    note(tracker, instance)
                return original(instance, *args, **kwargs)

            return watched

        return make

    def _note_object(self, tracker: str, instance: Any) -> None:
        self._objects[tracker] = weakref.ref(instance)
        self._next = 0.0

    def _object(self, tracker: str) -> Any:
        """Return the object with which the job logs; None without one. A closed SummaryWriter has no writers."""
        reference = self._objects.get(tracker)
        found = reference() if reference else None
        if found is None or getattr(found, "all_writers", ()) is None:
            self._objects.pop(tracker, None)
        return found


def _loaded(module: str, name: str) -> Any:
    """Return an attribute of a loaded module, without calling its `__getattr__`, which may import."""
    return vars(sys.modules[module]).get(name) if sys.modules.get(module) else None


def _find_wandb(logged: Any) -> TrackerRun | None:
    """Return the run of W&B: its global run, or the one that the job logs to.

    In a forked child, reading its parent's run would connect to W&B's service. Offline, reading the URL would print a
    warning.
    """
    current = _loaded("wandb", "run")
    run = logged if current is None else current
    if run is None or getattr(run, "_attach_pid", os.getpid()) != os.getpid() or run.disabled:
        return None

    def write(figures: Figures) -> None:
        run.summary.update({f"rankscope/{name}": value for name, value in figures.items()})

    return _checked(run.id, lambda: "" if run.offline else without_credentials(run.url or ""), write, run)


def _find_mlflow(logger: Any) -> TrackerRun | None:
    """Return the active run of MLflow in this thread, else the one of Lightning's logger."""
    active_run, tracking_uri = _loaded("mlflow", "active_run"), _loaded("mlflow", "get_tracking_uri")
    run = active_run() if active_run else None
    if run is not None:
        return _mlflow_run(run.info.run_id, run.info.experiment_id, tracking_uri)
    if logger is not None:
        return _mlflow_run(logger._run_id, logger._experiment_id, lambda: logger._tracking_uri)  # noqa: SLF001 - its properties create a run
    return None


def _mlflow_run(run_id: Any, experiment_id: Any, tracking_uri: Callable[[], str]) -> TrackerRun | None:
    """Return a run of MLflow with its page on the tracking server; a directory or a database has none."""

    def url() -> str:
        server = without_credentials(tracking_uri()).rstrip("/")
        return f"{server}/#/experiments/{experiment_id}/runs/{run_id}" if is_link(server) else ""

    def write(figures: Figures) -> None:
        # Not through the active run, which belongs to a thread. An ended run accepts tags too.
        client = sys.modules["mlflow"].MlflowClient(tracking_uri=tracking_uri())
        for name, value in figures.items():
            client.set_tag(run_id, f"rankscope.{name}", value)

    return _checked(run_id, url, write)


def _find_tensorboard(writer: Any) -> TrackerRun | None:
    """Return the directory of a SummaryWriter as a run. TensorBoard has neither ids nor pages."""
    return None if writer is None else _checked(os.fspath(writer.log_dir), str)


def _checked(
    identifier: Any, url: Callable[[], str], write: Callable[[Figures], object] | None = None, source: Any = None
) -> TrackerRun | None:
    """Return the run if its id is valid: a disabled tracker may have stand-ins for everything."""
    return TrackerRun(identifier, url, write, source) if isinstance(identifier, str) and identifier else None


FINDERS = {"wandb": _find_wandb, "mlflow": _find_mlflow, "tensorboard": _find_tensorboard}
