"""The checks of GPUs, from what was read. A value that is not known, or that has nothing to compare with, never fails.

Peers are the checked GPUs of the same model. With three or more, each is compared with their median. With fewer, it
is unknown which one is wrong: then only what the driver reports is a reference, such as the maximum clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rankscope.record.quantities import count
from rankscope_exporter.node_check.readings import Gpu
from rankscope_exporter.node_check.result import Outcome, Result

ENOUGH_PEERS = 3
OF_PEERS = {"sm_clock": 0.85, "matmul": 0.85, "memory_bandwidth": 0.9}
"""The least ratio of the median. Healthy GPUs of a model differ by 8% to 9% in a matrix product, because each has its
own voltage and temperature (Sinha et al., "Not All GPUs Are Created Equal", SC22); in memory bandwidth by less."""
OF_CLOCK_MAX = 0.7
"""The least ratio of the maximum clock, without peers. Boards of workstations stay a fifth below it."""
OF_BUS = 0.6
"""The least ratio of the memory bus's bandwidth: a copy on an H200 reaches 0.85 (docs/measurements/gpu_check.md)."""
SUSTAINED = 0.5  # share of the samples under load: clocks change for a moment when a load begins
THROTTLING = {
    "hw_slowdown": "check power supply and cooling of the GPU",
    "hw_thermal_slowdown": "check the cooling: fans, airflow, coolant",
    "hw_power_brake_slowdown": "check the node's power supplies",
    "sw_thermal_slowdown": "check the cooling: fans, airflow, coolant",
}
RETIRED_PAGES = 60  # NVIDIA, Dynamic Page Retirement: the board is replaced from 60 pages on
GIB = 2**30
Found = tuple[Outcome, str, str, str]
"""Outcome, measured, expected, advice."""
UNKNOWN: Found = ("not_run", "the driver does not report it", "", "")


def check_gpus(gpus: Sequence[Gpu]) -> Iterator[Result]:
    """Yield the results of all checks of each GPU."""
    for gpu in gpus:
        facts = gpu.facts
        if facts.error:
            advice = "Reset the GPU or reboot the node; if it returns, replace the GPU"
            yield Result("gpu", "failed", facts.error, "the GPU answers", advice, facts.index, facts.uuid)
            continue
        if facts.unreadable:
            yield Result("gpu", "not_run", facts.unreadable, gpu=facts.index, uuid=facts.uuid)
            continue
        peers = [one for one in gpus if one.facts.name == facts.name and not one.facts.error]
        for name, check in CHECKS.items():
            yield Result(name, *check(gpu, peers), facts.index, facts.uuid)


def in_use(gpu: Gpu) -> str:
    """Return which processes use the GPU; empty if none does, or if MIG shares it between jobs."""
    facts = gpu.facts
    if facts.is_mig or facts.error:
        return ""
    if pids := facts.pids:
        shown = ", ".join(map(str, sorted(pids)[:8]))
        return f"used by process{'es' if len(pids) > 1 else ''} {shown}{', …' if len(pids) > 8 else ''}"
    # In a container, processes of other containers are not listed.
    used = (facts.memory_used or 0) / GIB
    return f"{used:.1f} GiB are used, by a process that is not visible here" if used >= 1 else ""


def _use(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    used = in_use(gpu)
    if used:
        return "in_use", used, "no process computes", "End the processes if their job is over; no load was run here"
    return ("ok" if gpu.facts.pids is not None else "not_run"), "no process", "", ""


def _load(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    load, advice = gpu.load, "Reset the GPU or reboot the node; look for XIDs in the kernel log"
    if load.failure:
        return "failed", load.failure, "the load runs", advice
    return ("not_run", load.not_run, "", "") if load.not_run else ("ok", "completed", "", "")


def _sm_clock(gpu: Gpu, peers: Sequence[Gpu]) -> Found:
    mine = _clock(gpu)
    if mine is None:
        return _without_load(gpu)
    advice = "Look for locked clocks (nvidia-smi -rgc resets them) and a low power limit; reset the GPU"
    clocks = [clock for clock in map(_clock, peers) if clock is not None]
    if len(clocks) >= ENOUGH_PEERS:
        return _of_peers("sm_clock", mine, clocks, lambda hertz: f"{hertz / 1e6:.0f} MHz", advice)
    highest, limited = gpu.facts.clock_max, _share(gpu, "sw_power_cap") > 0
    if highest is None or limited:  # full load at the power limit lowers the clock of a healthy GPU
        return "not_run", f"{mine / 1e6:.0f} MHz, at the power limit" if limited else UNKNOWN[1], "", ""
    expected = f"at least {OF_CLOCK_MAX * highest / 1e6:.0f} MHz, {OF_CLOCK_MAX:.0%} of the maximum"
    is_set = _share(gpu, "applications_clocks_setting") > SUSTAINED  # by an administrator
    outcome: Outcome = "ok" if mine >= OF_CLOCK_MAX * highest else "warning" if is_set else "failed"
    return outcome, f"{mine / 1e6:.0f} MHz", expected, advice


def _matmul(gpu: Gpu, peers: Sequence[Gpu]) -> Found:
    return _rate(gpu, peers, "matmul", lambda rate: f"{rate / 1e12:.0f} TFLOP/s")


def _memory_bandwidth(gpu: Gpu, peers: Sequence[Gpu]) -> Found:
    found = _rate(gpu, peers, "memory_bandwidth", lambda rate: f"{rate / 1e9:.0f} GB/s")
    mine, bus = gpu.load.rates.get("memory_bandwidth"), gpu.facts.bandwidth_max
    if mine is None or bus is None or found[0] == "failed":
        return found
    outcome: Outcome = "ok" if mine >= OF_BUS * bus else "failed"
    expected = f"at least {OF_BUS * bus / 1e9:.0f} GB/s, {OF_BUS:.0%} of the memory bus"
    return outcome, f"{mine / 1e9:.0f} GB/s", expected, "Reset the GPU; if it returns, replace it"


def _rate(gpu: Gpu, peers: Sequence[Gpu], name: str, show: Callable[[float], str]) -> Found:
    mine = gpu.load.rates.get(name)
    if mine is None:
        return _without_load(gpu)
    rates = [peer.load.rates[name] for peer in peers if name in peer.load.rates]
    if len(rates) < ENOUGH_PEERS:
        return "not_run", f"{show(mine)}, with too few GPUs of this model to compare", "", ""
    return _of_peers(name, mine, rates, show, "Check clock, power and temperature of this GPU; if it stays, replace it")


def _of_peers(name: str, mine: float, rates: Sequence[float], show: Callable[[float], str], advice: str) -> Found:
    usual = median(rates)
    least = OF_PEERS[name] * usual
    expected = f"at least {show(least)}, {OF_PEERS[name]:.0%} of the median of {len(rates)} GPUs"
    return "ok" if mine >= least else "failed", f"{show(mine)}, {mine / usual:.0%} of the median", expected, advice


def _throttling(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    if not any(sample.reasons is not None for sample in gpu.loaded):
        return _without_load(gpu)
    for reason, advice in THROTTLING.items():
        share = _share(gpu, reason)
        if share:
            outcome: Outcome = "failed" if share >= SUSTAINED else "warning"
            return outcome, f"{reason} in {share:.0%} of the time under load", "no throttling", advice.capitalize()
    return "ok", "none", "", ""


def _power_limit(gpu: Gpu, peers: Sequence[Gpu]) -> Found:
    limit, usual = gpu.facts.power_limit, Counter(peer.facts.power_limit for peer in peers).most_common(1)[0]
    if limit is None:
        return UNKNOWN
    advice = "Set it as on the others: nvidia-smi -pl WATTS"
    if len(peers) >= ENOUGH_PEERS and usual[1] * 2 > len(peers) and limit < (usual[0] or 0.0):
        return "warning", f"{limit:.0f} W", f"{usual[0]:.0f} W, as most GPUs have", advice
    return "ok", f"{limit:.0f} W", "", ""


def _pcie(gpu: Gpu, peers: Sequence[Gpu]) -> Found:
    best, seen = gpu.facts.link_max, [_link(peer) for peer in peers]
    mine = _link(gpu)
    if mine is None:
        # An idle GPU lowers the generation of its link, and by NVIDIA's documentation maybe the lanes.
        return _without_load(gpu)
    is_low = [have is not None and most is not None and have < most for have, most in zip(mine, best, strict=True)]
    measured, expected = (f"generation {_number(g)}, {_number(w)} lanes" for g, w in (mine, best))
    if not any(is_low):
        return "ok", measured, "", ""
    advice = "Reseat the GPU or its riser; check the slot's setting in the BIOS"
    if len(seen) >= ENOUGH_PEERS and len(set(seen)) == 1:
        return "warning", f"{measured}, as all GPUs of this model", expected, "Check whether the node is built so"
    return "failed", measured, expected, advice


def _nvlink(gpu: Gpu, peers: Sequence[Gpu]) -> Found:
    links, most = gpu.facts.nvlinks, max(sum(peer.facts.nvlinks) for peer in peers)
    if not links or gpu.facts.is_mig:  # with MIG, NVLink is not used
        return "not_run", "MIG is enabled" if links else "the GPU has no NVLink", "", ""
    # Each link of a GPU in an NVSwitch fabric is used; without one, a bridge may use a part of them.
    expected = len(links) if gpu.facts.fabric else most
    down = ", ".join(str(index) for index, is_up in enumerate(links) if not is_up)
    measured = f"{sum(links)} of {len(links)} links are up" + (f" (down: {down})" if down else "")
    advice = "Check nvidia-smi nvlink -e and the neighbors; reset the GPUs and the fabric manager"
    return "ok" if sum(links) >= expected else "failed", measured, f"{expected} links", advice


def _fabric(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    if not gpu.facts.fabric or gpu.facts.is_mig:
        return "not_run", "MIG is enabled" if gpu.facts.fabric else "the GPU is in no NVSwitch fabric", "", ""
    state, status = gpu.facts.fabric
    if (state, status) == ("completed", "success"):
        return "ok", state, "", ""
    # CUDA does not start without the fabric, if it needs it.
    outcome: Outcome = "warning" if gpu.load.rates else "failed"
    advice = "Check the service nvidia-fabricmanager"
    return outcome, f"{state}, status {status}", "completed, status success", advice


def _row_remapping(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    pending, failed = gpu.facts.is_remapping_pending, gpu.facts.is_remapping_failed
    if failed:
        return "failed", "a row could not be remapped", "no failure", "Replace the GPU"
    if pending or gpu.facts.is_retirement_pending:
        what = "row remapping" if pending else "page retirement"
        return "failed", f"{what} is pending", "none", "Drain the node and reset the GPU, which completes it"
    if pending is None and gpu.facts.is_retirement_pending is None:
        return UNKNOWN
    return "ok", "none pending", "", ""


def _ecc(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    errors, pages = gpu.facts.uncorrected, gpu.facts.retired_pages
    if errors:
        advice = "Drain the node and reset the GPU; if errors return, replace it"
        return "failed", f"{count(round(errors), 'uncorrected error')} since the driver was loaded", "0", advice
    if pages is not None and pages >= RETIRED_PAGES:
        return "failed", f"{pages:.0f} retired pages", f"fewer than {RETIRED_PAGES}", "Replace the GPU"
    return UNKNOWN if errors is None else ("ok", "no uncorrected error", "", "")


def _recovery_action(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    action = gpu.facts.recovery_action
    advice = f"Drain the node and do what the driver asks for: {action}"
    return UNKNOWN if action is None else ("ok" if action == "none" else "failed", action, "none", advice)


def _xid(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    if gpu.xids:
        shown = ", ".join(f"XID {code}" for code in dict.fromkeys(gpu.xids))
        return "failed", f"{shown} during this check", "none", "Look up the code: docs/runbooks/RankscopeGpuXid.md"
    return "ok", "none during this check", "", ""


def _temperature(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    known = [sample for sample in gpu.samples if sample.temperature is not None]
    if not known:
        return UNKNOWN
    hottest = max(known, key=lambda sample: sample.temperature or 0.0)
    limit, margins = gpu.facts.temperature_max, [s.margin for s in known if s.margin is not None]
    is_hot = (limit is not None and (hottest.temperature or 0.0) >= limit) or (margins and min(margins) <= 0)
    expected = "below the temperature at which it slows down" + (f", {limit:.0f} °C" if limit is not None else "")
    return "failed" if is_hot else "ok", f"{hottest.temperature:.0f} °C", expected, "Check the cooling"


def _persistence(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    mode = gpu.facts.persistence
    advice = "Start the service nvidia-persistenced; without it each first process initializes the GPU again"
    return UNKNOWN if not mode else ("ok" if mode == "enabled" else "warning", mode, "enabled", advice)


def _compute_mode(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    mode = gpu.facts.compute_mode
    advice = "Allow processes: nvidia-smi -c DEFAULT"
    return UNKNOWN if not mode else ("failed" if mode == "prohibited" else "ok", mode, "not prohibited", advice)


def _gpm(gpu: Gpu, _: Sequence[Gpu]) -> Found:
    return ("ok", "available", "", "") if gpu.facts.has_gpm else ("not_run", "not available (Hopper and later)", "", "")


CHECKS: dict[str, Callable[[Gpu, Sequence[Gpu]], Found]] = {
    "in_use": _use,
    "load": _load,
    "sm_clock": _sm_clock,
    "matmul": _matmul,
    "memory_bandwidth": _memory_bandwidth,
    "throttling": _throttling,
    "power_limit": _power_limit,
    "pcie": _pcie,
    "nvlink": _nvlink,
    "fabric": _fabric,
    "row_remapping": _row_remapping,
    "ecc": _ecc,
    "recovery_action": _recovery_action,
    "xid": _xid,
    "temperature": _temperature,
    "persistence_mode": _persistence,
    "compute_mode": _compute_mode,
    "gpm": _gpm,
}


def _without_load(gpu: Gpu) -> Found:
    """Return that a check needs a load, and why there was none."""
    reason = gpu.load.not_run or gpu.load.failure
    return "not_run", reason or "the driver did not show this GPU under load", "", ""


def _clock(gpu: Gpu) -> float | None:
    clocks = [sample.clock for sample in gpu.loaded if sample.clock is not None]
    return median(clocks) if clocks else None


def _share(gpu: Gpu, reason: str) -> float:
    known = [sample.reasons for sample in gpu.loaded if sample.reasons is not None]
    return sum(reason in reasons for reasons in known) / len(known) if known else 0.0


def _link(gpu: Gpu) -> tuple[float | None, float | None] | None:
    """Return the best generation and lanes under load; None without a load."""
    if not gpu.loaded:
        return None
    generations, lanes = ([n for s in gpu.loaded if (n := s.link[part]) is not None] for part in (0, 1))
    return max(generations, default=None), max(lanes, default=None)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"
