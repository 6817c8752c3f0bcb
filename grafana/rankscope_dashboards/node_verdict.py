"""The tile at the top of the dashboard *Node*: the worst problem of the exporter, its driver and its GPUs."""

from __future__ import annotations

from rankscope_dashboards.findings import firing, first_said, in_words, said, worst_finding
from rankscope_dashboards.hardware import THROTTLED_MOST
from rankscope_dashboards.panels import NORMAL, Query, sentence
from rankscope_dashboards.selectors import HERE, age
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.report.colors import BAD, CAUTION, NEUTRAL

GPUS_HERE = f"rankscope_gpu_info{{{HERE}}}"
RANKS_HERE = f"rankscope_rank_info{{{HERE}}}"
RUNS_HERE = f"({RANKS_HERE} and on (run, owner, rank) rankscope_rank_up{{{HERE}}} == 1)"
# About a GPU or ranks of this node, or about a run. In a hang of one rank, those of all nodes stand still.
FOUND_HERE = (
    f'(rankscope_finding_info{{uuid!=""}} and on (uuid) {GPUS_HERE}'
    f' or rankscope_finding_info{{node!=""}} and on (run, owner, node) {RANKS_HERE}'
    f' or rankscope_finding_info{{node=""}} and on (run, owner) {RUNS_HERE}'
    f' or rankscope_finding_info{{kind="hang"}} and on (run, owner) {RUNS_HERE})'
)
# Some alerts about a GPU have the GPU's label, but not the exporter's.
FIRING = (
    f'ALERTS{{alertstate="firing",alertname=~"Rankscope.+",{HERE}}}'
    f' or (ALERTS{{alertstate="firing",uuid!=""}} and on (uuid) {GPUS_HERE})'
)
OTHER_ALERTS = f"{firing(HERE)} or ({firing('uuid!=' + chr(34) * 2)} and on (uuid) {GPUS_HERE})"
# A target that is down has only the series `up`, and other jobs may have the same instance.
EXPORTERS = f"last_over_time(rankscope_exporter_build_info{{{HERE}}}[$__range])"
DOWN = f"max(up{{{HERE}}} and on (job, instance) {EXPORTERS}) == 0"
NO_DRIVER = f"max(rankscope_exporter_nvml_up{{{HERE}}}) == 0"
LOST_GPU = f"bottomk(1, max by (gpu) (rankscope_gpu_up{{{HERE}}}) == 0)"
MISSING = f"max(rankscope_exporter_gpus_expected{{{HERE}}} - rankscope_exporter_gpus_seen{{{HERE}}})"
LOST = (
    f'count_values ("lost", {MISSING} > 0) * on () group_left (all)'
    f' count_values ("all", max(rankscope_exporter_gpus_expected{{{HERE}}}))'
)
RELEASED = f"max(rankscope_exporter_gpus_released{{{HERE}}}) == 1"
# Since an XID error, for ten minutes: then it is only in the tile below.
XID_AGE = f"bottomk(1, max by (gpu, xid) ({age(f'rankscope_gpu_xid_last_timestamp_seconds{{{HERE}}}')}) < 600)"
MOST_THROTTLED = (
    f'count_values by (gpu, reason) ("percent", round(100 * ({THROTTLED_MOST} > {Thresholds().throttled})))'
)
GPUS_UP = f'count_values ("gpus", count(max by (uuid) (rankscope_gpu_up{{{HERE}}} == 1)) or on () vector(0))'
RANKS_UP = (
    f'count_values ("ranks", count(max by (run, owner, rank) (rankscope_rank_up{{{HERE}}} == 1)) or on () vector(0))'
)
UP = f"max(up{{{HERE}}} and on (job, instance) {EXPORTERS}) == 1"
ANSWERS = f"{GPUS_UP} * on () group_left (ranks) {RANKS_UP} and on () ({UP})"

ANY_RUN = 'run!=""'
SENTENCES = (
    said(DOWN, "EXPORTER DOWN: Prometheus cannot scrape it, and nothing about this node is known"),
    said(NO_DRIVER, "DRIVER DOWN: the NVIDIA driver does not answer"),
    said(
        f"{LOST} * on () group_left (gpu) ({LOST_GPU} + 1)",
        *("GPU LOST: GPU ", "{gpu}", " does not answer; lost: ", "{lost}", " of ", "{all}"),
    ),
    said(LOST, "GPU LOST: ", "{lost}", " of ", "{all}", " GPUs do not answer"),
    worst_finding("critical", ANY_RUN, f" and {FOUND_HERE}"),
    said(in_words(XID_AGE, "gpu, xid"), "XID ", "{xid}", " on GPU ", "{gpu}", ", ", "{for}", " ago"),
    said(MOST_THROTTLED, "THROTTLED: GPU ", "{gpu}", ", ", "{percent}", "% of the time, by ", "{reason}"),
    worst_finding("warning", ANY_RUN, f" and {FOUND_HERE}"),
    said(f"topk(1, {OTHER_ALERTS})", "ALERT: ", "{alertname}"),
    said(RELEASED, "RELEASED: the exporter has released the GPUs on request, and shows nothing about them"),
    said(ANSWERS, "NO PROBLEM FOUND: ", "{gpus}", " GPUs answer, ", "{ranks}", " ranks are alive"),
    said("vector(1)", "NO DATA: no exporter of this name in this time range"),
)
COLORS = {
    **dict.fromkeys(("EXPORTER", "DRIVER", "GPU", "CRITICAL", "CRASHED", "HUNG"), BAD),
    **dict.fromkeys(("XID", "THROTTLED", "WARNING", "ALERT", "RELEASED"), CAUTION),
    "NO DATA": NEUTRAL,
    "NO PROBLEM": NORMAL,
}

NODE_VERDICT = sentence(
    "Verdict",
    "The worst problem of the exporter, the driver, the GPUs and the ranks on them. A finding has the words of the "
    "diagnosis. `XID` is shown for ten minutes after the error.",
    Query(first_said(SENTENCES), "{{said}}"),
    colors=COLORS,
)
