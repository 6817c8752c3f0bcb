"""The rows of the dashboard *Node* about whose the GPUs are: who holds each, their time, the ranks here."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import NEUTRAL, WELL, Panel, Query, bars, lines, shares
from rankscope_dashboards.selectors import HERE
from rankscope_dashboards.tables import Column, table_of

# Working is green; held and not used in the warm colors; free is nobody's loss.
STATES = {
    "working": "semi-dark-green",
    "free": "semi-dark-blue",
    "allocated_no_process": "semi-dark-orange",
    "process_no_work": "semi-dark-yellow",
    "memory_held_by_dead": "semi-dark-purple",
    "suspected_hang": "semi-dark-red",
    "unknown": NEUTRAL,
}
STATE_NAMES = {state: (state.replace("_", " "), color) for state, color in STATES.items()}
WHOSE = "source, user, run, rank, slurm_job_id, slurm_job_name, k8s_namespace, k8s_pod, k8s_container, container_id"
STATE_SECONDS = f"increase(rankscope_gpu_state_seconds_total{{{HERE}}}[$__range])"
# A rank of a run has one line, whether its record or its successor's is shown.
RANK = "{{run}} rank {{rank}}"


def line_by_rank(title: str, description: str, unit: str, vector: str) -> Panel:
    """A line for each rank of this node, four panels side by side."""
    return lines(
        title, description, unit, Query(f"max by (run, owner, rank) ({vector})", RANK), width=6, none="no rank here"
    )


HOLDERS = Row(
    "Who holds the GPUs, and what does their time go to?",
    (
        table_of(
            "Who holds each GPU",
            "The job, pod, user or run that holds each GPU, as far as it is known, and what its time goes to now. "
            "`allocated no process`: a scheduler or a rank claims it and nothing runs on it. `process no work`: a "
            "process sits on it without a kernel. `memory held by dead`: what holds its memory lives no more. "
            "`suspected hang`: kernels run and no rank makes progress.",
            [
                Query(f"max by (gpu, uuid, state) (rankscope_gpu_state_info{{{HERE}}})"),
                Query(f"max by (gpu, uuid, {WHOSE}) (rankscope_gpu_allocation_info{{{HERE}}})"),
            ],
            [
                Column("gpu", "GPU"),
                Column("state", "State", names=STATE_NAMES),
                Column("source", "Known from"),
                Column("user", "User"),
                Column("run", "Run"),
                Column("rank", "Rank"),
                Column("slurm_job_id", "Slurm job"),
                Column("slurm_job_name", "Slurm name"),
                Column("k8s_namespace", "Namespace"),
                Column("k8s_pod", "Pod"),
                Column("k8s_container", "Container"),
                Column("container_id", "Container id"),
            ],
        ),
        shares(
            "GPU time by state",
            "What the GPUs' time goes to, averaged over them. A pause of up to a minute still counts as working. Held "
            "and not used is what somebody else could have.",
            Query(f"avg by (state) (rate(rankscope_gpu_state_seconds_total{{{HERE}}}[$__rate_interval]))", "{{state}}"),
            colors=STATES,
        ),
        bars(
            "GPU time by state, GPU by GPU",
            "What each GPU's time went to over the time range.",
            Query(f"max by (gpu, state) ({STATE_SECONDS}) / on (gpu) group_left () sum by (gpu) ({STATE_SECONDS})"),
            bar="gpu",
            part="state",
            colors=STATES,
        ),
    ),
)

RANKS = Row(
    "Ranks on this node",
    (
        table_of(
            "Ranks",
            "The ranks whose records lie on this node. The dashboard *Run* has more of each.",
            [
                Query(f"max by (run, owner, rank) (rankscope_rank_up{{{HERE}}})"),
                Query(f"max by (run, owner, rank, pid) (rankscope_rank_info{{{HERE}}})"),
                Query(
                    f"max by (run, owner, rank, gpu) (rankscope_rank_info{{{HERE}}}"
                    f" * on (uuid) group_left (gpu) rankscope_gpu_info{{{HERE}}})"
                ),
                Query(f"max by (run, owner, rank) (rankscope_rank_steps_total{{{HERE}}})"),
            ],
            [
                Column("run", "Run"),
                Column("owner", "Owner"),
                Column("rank", "Rank"),
                Column("A", "Alive", names={1: ("yes", WELL), 0: ("no", NEUTRAL)}),
                Column("pid", "PID"),
                Column("gpu", "GPU"),
                Column("D", "Steps"),
            ],
            none="no rank",
        ),
        line_by_rank(
            "Processors in use",
            "Processors that each rank keeps busy, its own process and its loader workers together. What all need "
            "together must fit into the node.",
            "none",
            f"sum without (who) (rate(rankscope_rank_cpu_seconds_total{{{HERE}}}[$__rate_interval]))",
        ),
        line_by_rank(
            "Waiting for a processor",
            "Share of the time in which the rank's main thread could have run and had no processor.",
            "percentunit",
            f"rate(rankscope_rank_run_queue_seconds_total{{{HERE}}}[$__rate_interval])",
        ),
        line_by_rank(
            "Read from storage",
            "What each rank and its children read from storage, not from the page cache; absent where the exporter may "
            "not know.",
            "Bps",
            f"rate(rankscope_rank_read_bytes_total{{{HERE}}}[$__rate_interval])",
        ),
        line_by_rank(
            "Resident memory",
            "Host memory of each rank's process, without its children's.",
            "bytes",
            f"rankscope_rank_resident_memory_bytes{{{HERE}}}",
        ),
    ),
    collapsed=True,
)
