"""The findings of the diagnosis in its own words, for tiles and tables.

`rankscope_finding_info` has the sentence. It and the finding's other series have the same labels otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankscope_dashboards.links import (
    RANK_ZERO,
    RUNBOOK_OF_KIND,
    THIS_RUN,
    cell,
    node_link,
    rank_link,
    run_link,
    runbook_link,
)
from rankscope_dashboards.panels import Panel, Query
from rankscope_dashboards.selectors import age
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.diagnosis.words import WORDS
from rankscope_exporter.report.colors import BAD, CAUTION

FINDING = "run, owner, kind, severity, rank, gpu, uuid, summary, advice"
SEVERITIES = {"critical": ("critical", BAD), "warning": ("warning", CAUTION)}
WORDS_WIDTH = 260
"""Pixels of the sentences: the first steps are longer."""
OF_FINDINGS = "|".join(dict.fromkeys(RUNBOOK_OF_KIND[kind] for kind in (*WORDS, RANK_ZERO)))
"""The names of the alerts about findings. The table has the findings instead."""


ALERT_TEXTS = {
    "RankscopeAnalyzerDown": "No analyzer answers: runs that span nodes are not diagnosed",
    "RankscopeExporterDown": "An exporter does not answer",
    "RankscopeFlapping": "A fault keeps returning",
    "RankscopeGpuAllocatedIdle": "A live rank owns the GPU, and no kernel runs on it",
    "RankscopeGpuLost": "A GPU does not answer",
    "RankscopeGpuMemoryHeldIdle": "Memory of an idle GPU is allocated, and no rank uses it",
    "RankscopeGpuUnused": "A GPU is allocated and not used",
    "RankscopeGpuXid": "The driver has reported an XID error",
    "RankscopeGpuFaultRecurring": "A GPU was the culprit in several runs",
    "RankscopeManyAlerts": "Many alerts of one owner are one notification",
    "RankscopeRanksHidden": "The exporter does not show all ranks of the node",
    "RankscopeRunNotDiagnosed": "The run is not, or not fully, diagnosed",
}
"""What is wrong, for the alerts that are not about findings."""
FIRST_STEPS = {
    "RankscopeAnalyzerDown": "Check the analyzer's log.",
    "RankscopeExporterDown": "Check whether the node is up, and the exporter's log.",
    "RankscopeFlapping": "Look at the finding that returns, under its own time.",
    "RankscopeGpuAllocatedIdle": "Run `rankscope stacks` on its node to see what the rank waits for.",
    "RankscopeGpuLost": "Drain the node, and look for Xid in `dmesg`.",
    "RankscopeGpuMemoryHeldIdle": "Run `nvidia-smi` on the node, and end the process if its job is over.",
    "RankscopeGpuUnused": "Ask its owner, or cancel the allocation.",
    "RankscopeGpuXid": "Look up the code in the runbook.",
    "RankscopeGpuFaultRecurring": "Run `rankscope history` on the node, drain it, and run NVIDIA's diagnostics.",
    "RankscopeManyAlerts": "Look at the owner's runs on *Fleet*.",
    "RankscopeRanksHidden": "Look at the skipped files on *Node*.",
    "RankscopeRunNotDiagnosed": "Start an analyzer for runs that span nodes, or check the node that does not answer.",
}
"""What to do first about them."""


def open_findings(info: str) -> str:
    """Return the query of the age in seconds of the open findings that `info` selects, with the labels of their words.

    `info` is a selector of `rankscope_finding_info`.
    """
    since = "rankscope_finding_since_timestamp_seconds"
    times = f"({info} * ignoring (summary, evidence, advice) group_left () {since})"
    return f"max by ({FINDING}) ({age(times)})"


UNITS = (("s", 1, "< 60", 1), ("min", 60, ">= 60 < 3600", 0.1), ("h", 3600, ">= 3600", 0.1))
MINUTES = (("min", 60, ">= 0", 0.1),)


def in_words(seconds: str, labels: str, units: Sequence[tuple[str, int, str, float]] = UNITS) -> str:
    """Return the query with the label `for`, which has the seconds in words, such as `2.6 min`.

    Of series with the same `labels` it returns one. Its value has no meaning. The query has `seconds` once for each of
    the `units`: MINUTES are for costly ones.
    """
    parts = [
        f'label_replace(count_values by ({labels}) ("for", round(({seconds} {limits}) / {size}, {places})),'
        f' "for", "$1 {unit}", "for", "(.*)")'
        for unit, size, limits, places in units
    ]
    return f"({' or '.join(parts)})"


def said(vector: str, *parts: str) -> str:
    """Return the query with the label `said`: the parts in order, which are texts, or labels in braces: `{summary}`."""
    sources = []
    for number, part in enumerate(parts):
        label = part.strip("{}") if part.startswith("{") else f"part{number}"
        sources.append(f'"{label}"')
        if not part.startswith("{"):
            vector = f'label_replace({vector}, "{label}", "{part}", "", "")'
    return f'group by (said) (label_join({vector}, "said", "", {", ".join(sources)}))'


def by_label(vector: str, name: str, source: str, values: Mapping[str, str]) -> str:
    """Return the query with the label `name`: the one of `values` whose key, a regular expression, `source` matches."""
    for matched, value in values.items():
        vector = f'label_replace({vector}, "{name}", "{value}", "{source}", "{matched}")'
    return vector


def first_said(sentences: Sequence[str]) -> str:
    """Return the query of the first of `sentences` that has data; later ones may have data, too."""
    return " or on () ".join(sentences)


def worst_finding(severity: str, matchers: str, place: str = "", collective: str = "") -> str:
    """Return the query of what to say about the worst open finding of this severity. A crash or a hang is worse.

    `place` is a join that restricts the findings; `collective` is the query of the label `collective` for a hang.
    """
    selected = f'severity="{severity}",{matchers}'
    info, ratio = f"(rankscope_finding_info{{{selected}}}{place})", f"rankscope_finding_ratio{{{selected}"
    ratios = f'({ratio},kind=~"crash|hang"}} + 1 or {ratio}}})'
    largest = f"topk(1, {info} * ignoring (summary, evidence, advice) group_left () {ratios})"
    found = in_words(open_findings(f"({info} and {largest})"), "kind, summary")
    found = f'label_replace({found}, "begin", "{severity.upper()} for ", "", "")'
    found = by_label(found, "begin", "kind", {"hang": "HUNG for ", "crash": "CRASHED "})
    found = by_label(found, "ago", "kind", {"crash": " ago"})
    found = by_label(found, "summary", "summary", {"Run .+ hangs: (.+)": "$1"})
    if collective:
        found = f"{found} * on () group_left (collective) ({collective} or on () vector(1))"
        found = f'label_join({found}, "where", " ", "kind", "collective")'
        found = by_label(found, "in", "where", {"hang (.+)": ", others in $1"})
    return said(found, "{begin}", "{for}", "{ago}", ": ", "{summary}", "{in}")


def firing(matchers: str) -> str:
    """Return the query of the time since when each alert with these matchers fires that is not about a finding."""
    selected = f'{matchers},alertname=~"Rankscope.+",alertname!~"{OF_FINDINGS}"'
    return f'(ALERTS_FOR_STATE{{{selected}}} and ignoring (alertstate) ALERTS{{{selected},alertstate="firing"}})'


def findings_table(info: str, alerts: str, *, has_runs: bool = False) -> Panel:
    """Return the table of the open findings that `info` selects, and of the alerts that `alerts` selects by `firing`.

    The exporter of a finding's GPU is where the GPU is, also if an analyzer has found it.
    """
    exporters = "topk by (uuid) (1, group by (uuid, instance) (rankscope_gpu_info))"
    found = open_findings(info)
    places = f"{found} * on (uuid) group_left (instance) {exporters} or ignoring (instance) {found}"
    kinds = f'label_replace(label_join({places}, "at", "/", "kind", "rank"), "runbook", "$1", "kind", "(.*)")'
    findings = f'label_replace({kinds}, "runbook", "{RANK_ZERO}", "at", "straggler/0")'
    others = f"max by (alertname, severity, run, owner, rank, gpu, instance) (time() - ({alerts}))"
    others = f'label_replace({others}, "runbook", "$1", "alertname", "(.*)")'
    # As labels, not as mappings of the columns: Grafana makes a line as high as its labels need.
    others = by_label(by_label(others, "summary", "alertname", ALERT_TEXTS), "advice", "alertname", FIRST_STEPS)
    # A finding about several ranks, such as `4-7`, leads to the panels of all ranks.
    all_ranks = f'label_replace({findings} or {others}, "panels", "All", "", "")'
    rows = f'label_replace({all_ranks}, "panels", "$1", "rank", "([0-9]+)")'
    run, owner = (cell("Run"), cell("Owner")) if has_runs else (THIS_RUN["run"], THIS_RUN["owner"])
    runs = [Column("run", "Run", link=run_link(run, owner), width=112), Column("owner", "Owner", hidden=True)]
    return table_of(
        "Findings and alerts",
        "What is wrong now: the findings of the diagnosis in the words of their notifications, and the alerts about "
        "GPUs and exporters. A rank leads to its panels, a GPU to its node, and the first step to its runbook.",
        [Query(rows)],
        [
            Column("severity", "Severity", names=SEVERITIES, width=82),
            Column("A", "Age", "s", width=80, decimals=1),
            Column("summary", "What is wrong", wrap=True, width=WORDS_WIDTH),
            *(runs if has_runs else ()),
            Column("rank", "Rank", link=rank_link(cell("Panels"), run, owner), width=62),
            Column("panels", "Panels", hidden=True),
            Column("gpu", "GPU", link=node_link(cell("Exporter")), width=48),
            Column("instance", "Exporter", hidden=True),
            Column("advice", "First step and runbook", wrap=True, link=runbook_link("Runbook")),
            Column("runbook", "Runbook", texts=RUNBOOK_OF_KIND, hidden=True),
        ],
        height=7,
        empty="no open finding, no firing alert",
        sort="-severity",
    )
