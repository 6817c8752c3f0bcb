"""The settings of a run that may explain its speed: the labels of rankscope_rank_settings_info.

They are read from objects that the probes know, after each of the first steps and then every ten seconds, and written
if they have changed. Reading them only reads attributes; it calls no code of the job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from rankscope.foreign import attribute, is_known, items
from rankscope.process.identity import has_peers
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.text import replace_unprintable
from rankscope.timeline.steps import BACKWARD_PASS, SETTLED_STEPS
from rankscope.timeline.timeline import Timeline

INTERVAL = 10.0  # seconds
LONGEST = 80  # characters of a value; a hook may have any name, and the info has a fixed size
MOST_PARAMETERS = 64  # looked at

STEPS = INDEX["steps"]
MICRO_STEPS = INDEX["micro_steps"]
COLLECTIVES = INDEX["collectives"]
AMP_SCALE = INDEX["amp_scale"]

# Collectives with which a loop may average its gradients itself.
AVERAGING = [layout.OPS.index(op) for op in ("all_reduce", "all_gather", "reduce_scatter")]


class Settings:
    """The known settings. `on_change` is called when they have changed."""

    def __init__(
        self, timeline: Timeline, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeline = timeline
        self._on_change = on_change
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget the settings of the rank that this process was before."""
        self.known: dict[str, str] = {}
        self._next = 0.0
        self._counted = (0.0, 0.0)  # steps and micro-steps at the last poll

    def poll(self) -> None:
        """Read them again if that is due: at each poll of the first steps, then every INTERVAL."""
        now = self._clock()
        if self._timeline.steps.count > SETTLED_STEPS and now < self._next:
            return
        self._next = now + INTERVAL
        values = self._read()
        if values != self.known:
            self.known = values
            self._on_change()

    def _read(self) -> dict[str, str]:
        module, optimizer, loader = (self._object(role) for role in ("ddp", "optimizer", "loader"))
        found = {
            "parallelism": self._parallelism(module, optimizer),
            "precision": self._precision(optimizer),
            "step_marker": layout.STEP_MARKERS[self._timeline.steps.marker],
            "accumulation_steps": self._accumulation_steps(),
            "compiled": compiled(),
            **loader_settings(loader, self._timeline.job.repeats_batches),
            **ddp_settings(module),
        }
        return {name: replace_unprintable(found.get(name, ""), LONGEST) for name in layout.SETTINGS}

    def _object(self, role: str) -> Any:
        reference = self._timeline.job.objects.get(role)
        return reference() if reference else None

    def _parallelism(self, module: Any, optimizer: Any) -> str:
        """Return the parallelism, by the DDP module, else the kind of parameters, else the collectives."""
        if module is not None:
            return "ddp"
        if sharding := next(filter(None, map(sharding_of, parameters(optimizer))), ""):
            return sharding
        if not has_peers():
            return "single"
        slots = self._timeline.writer.slots
        averages = any(slots[COLLECTIVES + op] >= SETTLED_STEPS for op in AVERAGING)
        return "hand" if averages and "deepspeed" not in sys.modules else ""  # deepspeed averages too

    def _precision(self, optimizer: Any) -> str:
        """Return the data type of autocast, else of the parameters."""
        autocast = self._timeline.job.autocast
        return f"{autocast} autocast" if autocast else parameter_types(optimizer)

    def _accumulation_steps(self) -> str:
        """Return the backward passes per step since they were last counted, rounded: the last step is not complete.

        Empty if backward passes mark the steps: then the number is not known.
        """
        slots, (steps, micro_steps) = self._timeline.writer.slots, self._counted
        if self._timeline.steps.marker == BACKWARD_PASS:
            self._counted = (slots[STEPS], slots[MICRO_STEPS])
            return ""
        new_steps, new_micro_steps = slots[STEPS] - steps, slots[MICRO_STEPS] - micro_steps
        is_settled = new_steps >= SETTLED_STEPS
        # A gradient scaler skips some of the first steps, but not their backward passes.
        if not (new_steps and new_micro_steps) or not (is_settled or steps == slots[AMP_SCALE] == 0):
            return self.known.get("accumulation_steps", "")
        if is_settled:
            self._counted = (slots[STEPS], slots[MICRO_STEPS])
        return str(round(new_micro_steps / new_steps))


def parameters(optimizer: Any) -> Iterator[Any]:
    """Return the first parameters that an optimizer trains, at most MOST_PARAMETERS."""
    groups = items(attribute(optimizer, "param_groups")) or ()
    lists = (items(dict.get(group, "params")) or () for group in groups if issubclass(type(group), dict))
    return islice(chain.from_iterable(lists), MOST_PARAMETERS)


def sharding_of(parameter: Any) -> str:
    """Return how a parameter is sharded: `fsdp`, `fsdp2` with its mesh's other dimensions, `tp`; empty if it is not."""
    if attribute(parameter, "_fsdp_flattened") is True:  # FSDP marks all parameters that it manages
        return "fsdp"
    mesh = attribute(parameter, "device_mesh")
    names = attribute(mesh, "mesh_dim_names") or ()
    if mesh is None or type(names) is not tuple:
        return ""
    return "tp" if names == ("tp",) else "+".join(("fsdp2", *names[1:]))


def parameter_types(optimizer: Any) -> str:
    """Return the floating-point types of the parameters, without `torch.`."""
    types = {str(attribute(parameter, "dtype")) for parameter in parameters(optimizer) if is_known(type(parameter))}
    return "+".join(sorted(name.removeprefix("torch.") for name in types))


def loader_settings(iterator: Any, repeats_batches: bool = False) -> dict[str, str]:
    """Return the settings of a DataLoader's iterator, which does not keep its loader; empty for another one."""
    workers = attribute(iterator, "_num_workers")
    if type(workers) is not int:
        return {}
    size = attribute(attribute(iterator, "_index_sampler"), "batch_size")
    return {
        "loader_workers": str(workers),
        "pin_memory": str(attribute(iterator, "_pin_memory") is True).lower(),
        "batch_size": str(size) if type(size) is int and not repeats_batches else "",
    }


def ddp_settings(module: Any) -> dict[str, str]:
    """Return the communication hook and the bucket size of a DDP module; empty without one."""
    if module is None:
        return {}
    hooks = attribute(module, "_comm_hooks")
    names = [name_of(hook) for hook, _state in hooks or ()]
    size = attribute(module, "bucket_bytes_cap")
    return {
        "comm_hook": "+".join(names) or ("" if hooks is None else "none"),
        "bucket_bytes": "" if size is None else str(size),
    }


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of another object that is called like one."""
    name = attribute(function, "__name__")
    return name if type(name) is str else type.__getattribute__(type(function), "__name__")


def compiled() -> str:
    """Return `true` if torch.compile has compiled anything, by its own counters, else `false`."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    frames = getattr(dynamo, "counters", {}).get("frames", {})
    return "true" if frames.get("ok") else "false"
