"""Findings in words: one sentence that says what is wrong, where and how much, and what to do first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.readings import Run

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
LARGEST = 99.5
"""From here on a number has three digits."""


def percent(ratio: float) -> str:
    """Return a ratio with two significant digits at the most: `44%`, `6.3%`, `0.7%`."""
    value = 100.0 * ratio
    if value >= 9.95 or value < 0.01:
        return f"{value:.0f}%"
    return f"{value:.2g}%" if value >= 0.95 else f"{value:.1g}%"


def duration(seconds: float) -> str:
    """Return a time with two significant digits at the most: `40 s`, `1.8 min`, `3 h`, `10 days`."""
    if seconds < LARGEST:
        return f"{seconds:.0f} s"
    for unit, size in (("min", MINUTE), ("h", HOUR)):
        if seconds < LARGEST * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds / DAY:.2g} days" if seconds < LARGEST * DAY else f"{seconds / DAY:.0f} days"


def where(candidate: Candidate) -> str:
    """Return the rank with its node and GPU: `Rank 3 (node-a, GPU 3)`."""
    place = candidate.place
    around = ", ".join(text for text in (place.node, place.gpu and f"GPU {place.gpu}") if text)
    return f"Rank {place.rank} ({around})" if around else f"Rank {place.rank}"


class Words(NamedTuple):
    """Of one kind. `say` has the run's name and the candidate."""

    say: Callable[[str, Candidate], str]
    causes: Mapping[str, str] = {}
    """By cause, what follows the colon."""
    advice: Mapping[str, str] = {}
    """By cause; `` is for all others."""


_BATCHES_AHEAD = "with short epochs `persistent_workers=True`"
_ENDED = {"killed": "was killed", "exception": "ended with an exception"}
_MORE_WORK = "Usual reason: more work than the others. No throttling, foreign process or CPU contention is seen."
WORDS: Mapping[str, Words] = {
    "straggler": Words(
        lambda run, one: f"{where(one)} slows down run {run} by {percent(one.ratio)}",
        {
            "other": "extra work outside the model",
            "data_wait": "its data is late",
            "forward": "slow computation in forward",
            "backward": "slow computation in backward",
            "optimizer": "a slow optimizer step",
            "h2d_copy": "slow copies to its GPU",
            "device_wait": "it waits for its GPU",
            "throttled": "its GPU is throttled",
            "foreign_process": "another process is on its GPU",
            "cpu_contention": "it waits for CPU time",
            "aggregation": "it aggregates for the others",
            "expert_imbalance": "more tokens are routed to its experts",
            "unknown": "no single phase explains it",
        },
        {
            "other": "Run `rankscope stacks --rank RANK` on its node to see where it is. Usual reasons: logging, "
            "metrics, uploads, a checkpoint written by hand. Put `rankscope.phase` around the code.",
            "data_wait": f"Usual reasons: slow storage, too few loader workers, larger samples; {_BATCHES_AHEAD}.",
            "forward": _MORE_WORK,
            "backward": _MORE_WORK,
            "optimizer": "Usual reasons: offloaded optimizer state, CPU contention.",
            "h2d_copy": "Usual reasons: memory that is not pinned, the wrong NUMA node, a narrow PCIe link.",
            "device_wait": "Its GPU computes more slowly than the others', or has more to do.",
            "throttled": "Check its cooling and power.",
            "foreign_process": "End the process that is no rank: `nvidia-smi` lists it.",
            "cpu_contention": "Give it CPU cores of its own.",
            "expert_imbalance": "Balance the experts: an auxiliary loss, a capacity per expert, or another placement.",
            "aggregation": "Let all ranks share the work: all_reduce or reduce_scatter instead of gather and reduce.",
            "": "Run `rankscope stacks --rank RANK` on its node.",
        },
    ),
    "rotating_straggler": Words(
        lambda run, one: f"The ranks of run {run} slow each other down in turn by {percent(one.ratio)}",
        {
            "gc": "Python's garbage collector",
            "spikes": "single long steps",
            "uneven_work": "uneven work",
            "other": "extra work outside the model",
            "data_wait": "their data is late",
            "h2d_copy": "slow copies to their GPUs",
            "device_wait": "they wait for their GPUs",
            "unknown": "no single phase explains it",
        },
        {
            "data_wait": f"Usual reasons: slow storage, samples of different size; {_BATCHES_AHEAD}.",
            "": "Run `rankscope stacks` on a node a few times to see where the ranks are.",
            "gc": "Collect on all ranks in the same step: gc.disable(), and gc.collect() every so many steps.",
            "spikes": "Usual reasons: compilation for a new shape, garbage collection, a slow read now and then.",
            "uneven_work": "Group samples of similar length, or balance tokens over the ranks.",
        },
    ),
    "data": Words(
        lambda run, one: f"Run {run} waits for its data {percent(one.ratio)} of the time, on every rank",
        {
            "cpu": "loader workers compute",
            "io": "loader workers wait for storage",
            "unknown": "the reason is not known",
        },
        {
            "cpu": f"Use more workers, cheaper or precomputed transforms; {_BATCHES_AHEAD}.",
            "io": "Use faster or closer storage, a local cache, more prefetching, larger files.",
            "unknown": f"Give the loader workers (`num_workers`); {_BATCHES_AHEAD}.",
        },
    ),
    "network": Words(
        lambda run, one: f"Run {run} spends {percent(one.ratio)} of the time in transfer",
        {"network": "every rank waits", "link": "{link}", "unknown": "the reason is not known"},
        {
            "link": "Check cable, transceiver and slot. A GPU's link is reduced if it has fewer PCIe lanes or NVLinks "
            "than it can have.",
            "": "Check the network's errors and load. Larger batches, gradient accumulation, compression and more "
            "overlap lower the share.",
        },
    ),
    "small_collectives": Words(
        lambda run, one: f"Run {run} spends {percent(one.ratio)} of the time in many small collectives",
        advice={
            "": "Keep metrics on the device, and reduce them when they are logged. With FSDP, shard larger modules."
        },
    ),
    "stage_imbalance": Words(
        lambda run, one: (
            f"Stage {one.evidence.get('stage', 0.0):.0f} of the pipeline of run {run} slows down the others by "
            f"{percent(one.ratio)}"
        ),
        {
            "forward": "more work in forward",
            "backward": "more work in backward",
            "data_wait": "its data is late",
            "other": "extra work outside the model",
            "optimizer": "a slow optimizer step",
            "h2d_copy": "slow copies to its GPU",
            "device_wait": "more work",
            "unknown": "no single phase explains it",
        },
        {
            "": "Move layers to other stages. If it is a single rank, its GPU may be slow: no other rank does the "
            "same work, so there is none to compare it with."
        },
    ),
    "bubble": Words(
        lambda run, one: f"The pipeline of run {run} is empty {percent(one.ratio)} of the time",
        {"": "too few micro-batches"},
        {"": "Use more micro-batches, or an interleaved or zero-bubble schedule."},
    ),
    "copies": Words(
        lambda run, one: f"Run {run} waits for copies to its GPUs {percent(one.ratio)} of the time",
        advice={"": "Use pin_memory=True with non_blocking=True."},
    ),
    "launch": Words(
        lambda run, one: f"The GPUs of run {run} wait for their hosts {percent(one.ratio)} of the time",
        {"": "kernels are launched too slowly"},
        {"": "torch.compile, CUDA graphs, larger batches and fused optimizers need fewer launches."},
    ),
    "device_reads": Words(
        lambda run, one: f"The GPUs of run {run} have nothing to do {percent(one.ratio)} of the time",
        {"": "the script reads a value from them in every step"},
        {"": "Read (.item(), .cpu(), print) only every so many steps, and keep metrics on the device until then."},
    ),
    "throttling": Words(
        lambda run, one: f"Run {run} loses {percent(one.ratio)} of its GPU time to throttling",
        advice={"": "Check power limits and cooling."},
    ),
    "hang": Words(
        lambda run, one: (
            f"Run {run} hangs"
            if one.cause == "inside_collective"
            else f"Run {run} hangs: {where(one)} is stuck in {one.cause}"
        ),
        {"inside_collective": "every rank is inside a collective"},
        {"": "Run `rankscope stacks` on its node to see where it is."},
    ),
    "crash": Words(
        lambda run, one: (
            f"{where(one)} of run {run} " + ("was killed" if one.cause == "killed" else "ended with an exception")
        ),
        advice={
            "killed": "It ended without a word: SIGKILL, out of memory, or a crash in native code. Check dmesg.",
            "": "Check the job's output for the exception.",
        },
    ),
    "slow_startup": Words(
        lambda run, _one: f"Run {run} has been starting for long and has made no step",
        advice={
            "": "Usual reasons: indexing of the data set on every rank, a checkpoint from slow storage, compilation "
            "without a cache, a rank that is missing."
        },
    ),
    "slow_checkpoint": Words(
        lambda run, one: f"Run {run} spends {percent(one.ratio)} of its time in checkpoints",
        advice={
            "": "Write them in the background (torch.distributed.checkpoint.async_save), each rank its own part, to "
            "fast storage first, or less often."
        },
    ),
    "checkpoint_overdue": Words(
        lambda run, one: f"Run {run} has written no checkpoint for {duration(one.evidence.get('age', 0.0))}",
        {"never": "none since it began"},
        {"": "A failure now loses as much time of every GPU of the run."},
    ),
    "low_utilization": Words(
        lambda run, one: f"Run {run} keeps its GPUs busy only {percent(1.0 - one.ratio)} of the time",
        {
            "batch_too_small": "its batches are too small",
            "memory_bound": "their memory is full",
            "unknown": "the reason is not known",
        },
        {
            "batch_too_small": "There is memory for a larger batch. Else use torch.compile or CUDA graphs.",
            "memory_bound": "Checkpoint activations, shard the optimizer's state, use lower precision.",
            "unknown": "Profile one step.",
        },
    ),
    "cpu_fallback": Words(
        lambda run, one: f"{where(one)} of run {run} trains on the CPU",
        {"": "no kernel runs on its GPU"},
        {"": "Usual reasons: a torch without CUDA, an old driver, CUDA_VISIBLE_DEVICES, a model that was never moved."},
    ),
    "loss_scale_collapse": Words(
        lambda run, one: f"The loss scale of run {run} has collapsed to {one.evidence.get('scale', 0.0):.2g}",
        {"": "its steps are skipped"},
        {"": "Check the loss: a bad batch, a learning rate that is too high. Go back to a checkpoint from before."},
    ),
}


SAY_IT_ALL = ("hang", "crash", "checkpoint_overdue")
"""Kinds whose sentences need no cause after them, unless there are words for it."""


def sentence(run: Run, candidate: Candidate) -> str:
    """Return what is wrong, where and how much, in one sentence without a full stop."""
    words = WORDS[candidate.kind]
    known = words.causes.get(candidate.cause, "").replace("{link}", _link(candidate))
    because = known or ("" if candidate.kind in SAY_IT_ALL else candidate.cause)
    said = words.say(run[0], candidate)
    return f"{said}: {because}" if because else said


PORT_FAULTS: Mapping[str, Callable[[float], str]] = {
    "port_down": lambda _count: "is or was down",
    "port_rate": lambda ratio: f"runs at {percent(ratio)} of its peers' rate",
    "port_errors": lambda rate: f"has {float(f'{rate:.2g}'):g} errors per second",
    "port_drops": lambda ratio: f"drops {percent(ratio)} of its packets",
}
"""By the name of the evidence."""


def _link(candidate: Candidate) -> str:
    place = candidate.place
    if not place.port:
        return f"the link of r{where(candidate)[1:]} is reduced"
    known = (say(candidate.evidence[name]) for name, say in PORT_FAULTS.items() if name in candidate.evidence)
    return f"port {place.port} of {place.node} {next(known, 'is at fault')}"


def advice(candidate: Candidate) -> str:
    """Return what to do first."""
    texts = WORDS[candidate.kind].advice
    text = texts.get(candidate.cause, texts.get("", ""))
    return text.replace("RANK", str(candidate.place.rank))
