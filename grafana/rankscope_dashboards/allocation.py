"""The rows of the dashboard *Node* about the GPUs' allocation, their time by state, and the ranks on the node."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import NORMAL, Panel, Query, bars, lines, shares
from rankscope_dashboards.selectors import HERE
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import NEUTRAL, STATE_COLORS

STATE_NAMES = {state: (state.replace("_", " "), color) for state, color in STATE_COLORS.items()}
LABELS = (
    "source, user, run, rank, slurm_job_id, slurm_job_name, slurm_account, slurm_partition, "
    "k8s_namespace, k8s_pod, k8s_container, container_id"
)
STATE_SECONDS = f"increase(rankscope_gpu_state_seconds_total{{{HERE}}}[$__range])"
# A rank of a run has one line, also if it was restarted.
RANK = "{{run}} rank {{rank}}"


def line_by_rank(title: str, description: str, unit: str, vector: str) -> Panel:
    """Return a graph with a line for each rank of the node, a quarter of the dashboard wide."""
    return lines(
        title, description, unit, Query(f"max by (run, owner, rank) ({vector})", RANK), width=6, empty="no ranks"
    )


ALLOCATION = Row(
    "Who uses the GPUs, and how?",
    (
        table_of(
            "GPU allocation",
            "The job, pod, user or run that each GPU is allocated to, if known, and the GPU's state. `allocated no "
            "process`: allocated by a scheduler or a rank, but no process runs on it. `process no work`: a process has "
            "a context but runs no kernels. `memory held by dead`: the process that allocated its memory has ended. "
            "`suspected hang`: kernels run, but no rank makes progress.",
            [
                Query(f"max by (gpu, uuid, state) (rankscope_gpu_state_info{{{HERE}}})"),
                Query(f"max by (gpu, uuid, {LABELS}) (rankscope_gpu_allocation_info{{{HERE}}})"),
            ],
            [
                Column("gpu", "GPU"),
                Column("state", "State", names=STATE_NAMES),
                Column("source", "Source"),
                Column("user", "User"),
                Column("run", "Run"),
                Column("rank", "Rank"),
                Column("slurm_job_id", "Slurm job"),
                Column("slurm_job_name", "Slurm name"),
                Column("slurm_account", "Account"),
                Column("slurm_partition", "Partition"),
                Column("k8s_namespace", "Namespace"),
                Column("k8s_pod", "Pod"),
                Column("k8s_container", "Container"),
                Column("container_id", "Container ID"),
            ],
        ),
        shares(
            "GPU time by state",
            "The GPUs' time by state, averaged over the GPUs. A pause of up to a minute counts as working. Allocated "
            "and unused GPUs could be used by other jobs.",
            Query(f"avg by (state) (rate(rankscope_gpu_state_seconds_total{{{HERE}}}[$__rate_interval]))", "{{state}}"),
            colors=STATE_COLORS,
        ),
        bars(
            "GPU time by state and GPU",
            "Each GPU's time by state over the time range.",
            Query(f"max by (gpu, state) ({STATE_SECONDS}) / on (gpu) group_left () sum by (gpu) ({STATE_SECONDS})"),
            bar="gpu",
            part="state",
            colors=STATE_COLORS,
        ),
    ),
)

RANKS = Row(
    "Ranks on this node",
    (
        table_of(
            "Ranks",
            "The ranks with records on this node. The dashboard *Run* shows their details.",
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
                Column("A", "Alive", names={1: ("yes", NORMAL), 0: ("no", NEUTRAL)}),
                Column("pid", "PID"),
                Column("gpu", "GPU"),
                Column("D", "Steps"),
            ],
            empty="no ranks",
        ),
        line_by_rank(
            "CPUs used",
            "CPUs used by each rank's process and its loader workers. The node needs enough CPUs for the sum.",
            "none",
            f"sum without (who) (rate(rankscope_rank_cpu_seconds_total{{{HERE}}}[$__rate_interval]))",
        ),
        line_by_rank(
            "Waiting for CPU time",
            "Share of the time in which the rank's main thread was runnable and had no CPU.",
            "percentunit",
            f"rate(rankscope_rank_run_queue_seconds_total{{{HERE}}}[$__rate_interval])",
        ),
        line_by_rank(
            "Read from storage",
            "Bytes that each rank and its children read from storage, not from the page cache. The exporter needs the "
            "same user or CAP_SYS_PTRACE.",
            "Bps",
            f"rate(rankscope_rank_read_bytes_total{{{HERE}}}[$__rate_interval])",
        ),
        line_by_rank(
            "Resident memory",
            "Host memory of each rank's process, without its children.",
            "bytes",
            f"rankscope_rank_resident_memory_bytes{{{HERE}}}",
        ),
    ),
    collapsed=True,
)
