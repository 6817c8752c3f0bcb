"""Check whether a job hangs at its end more often with the hook.

    OMP_NUM_THREADS=1 python -m validation.job_endings --jobs gather hugging_face --pairs 200 150 --save

A job over gloo whose script ends right after `destroy_process_group()` may never end, with or without the hook (torch
2.13). DDP's reducer has the last reference to the process group, so the group is destroyed with the model: at the end
of the script's main function, with the GIL held. The group's destructor joins gloo's thread. If that thread has not yet
released the last all-gather, it frees it, and needs the GIL to release tensors that have Python objects
(`~AsyncAllgatherWork`, `TensorImpl::decref_pyobject`).

So each job here gathers a metric last, destroys the group and returns. Runs with and without the hook alternate, also
in being first. Ranks are forked from a process that has imported everything, and end like a script, with the
interpreter's whole finalization. A run has hung if the main thread of a rank that has reached its last metric sleeps
for 20 s without a break. It is then killed. A second failure of torch is counted, too: if a thread of gloo's waits for
the GIL while the interpreter finalizes, Python ends the thread, and the process aborts.

Brackets are 95% intervals (Wilson's; Newcombe's of the difference); p is Fisher's exact test, one-sided and two-sided.
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from testing import report
from testing.processes import stat
from testing.statistics import fisher, newcombe, wilson
from torch import nn

import rankscope
from rankscope import attach, probes
from rankscope.record.writer import SUFFIX

RANKS = 2
STEPS = 4
HANGS_AFTER = 20.0  # seconds of sleep after the last metric; a healthy job waits only for the other rank
PUT_ASIDE_AFTER = 1.0  # seconds of sleep after which the next run starts: a sleeping job needs no CPU
TRAINED_WITHIN = 60.0  # seconds
KINDS = {False: "without", True: "with"}
OUTCOMES = ("hung", "aborted", "ended")


def gather(reached: Callable[[], None]) -> None:
    """Train with DDP, and gather a metric of all ranks."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    metric = loss.detach().reshape(1)
    metrics = [torch.empty(1) for _ in range(RANKS)]
    reached()
    dist.all_gather(metrics, metric)
    dist.destroy_process_group()


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits of two classes."""
        logits = self.layer(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def hugging_face(reached: Callable[[], None]) -> None:
    """Train with the Trainer, which gathers the losses of an evaluation."""
    from transformers import Trainer, TrainingArguments

    samples = [{"inputs": torch.randn(8), "labels": torch.tensor(1)} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=os.environ["RANKSCOPE_RUN_DIR"],
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=WithLoss(), args=arguments, train_dataset=samples, eval_dataset=samples[:16])
    trainer.train()
    reached()
    trainer.evaluate()
    dist.destroy_process_group()


# The jobs, with modules that they would import during training (DDP: the compiler).
JOBS: dict[str, tuple[Callable[[Callable[[], None]], None], tuple[str, ...]]] = {
    "gather": (gather, ("torch._dynamo",)),
    "hugging_face": (hugging_face, ("torch._dynamo", "accelerate", "transformers.trainer")),
}


@dataclass
class Run:
    """One job: its processes, and how each ended (an exit code, or None for a hang)."""

    is_hooked: bool
    directory: Path
    started: float = field(default_factory=time.monotonic)
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int | None] = field(default_factory=dict)  # by pid; None: hung
    has_reached: bool = False  # by all ranks: the last metric
    awake: float = field(default_factory=time.monotonic)  # when a rank last did something after that

    def reached(self) -> Path:
        """Return the file with a byte for each rank that has reached its last metric."""
        return self.directory / "reached"

    def log(self) -> Path:
        """Return the file with the ranks' output."""
        return self.directory / "log"

    def running(self) -> list[int]:
        """Return the processes that have not ended."""
        return [pid for pid in self.pids if pid not in self.codes]

    def check(self) -> None:
        """Reap processes that have ended, and kill a run that hangs."""
        now = time.monotonic()
        for pid in self.running():
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        if not self.has_reached:
            self.has_reached = self.reached().exists() and self.reached().stat().st_size == RANKS
            self.awake = now
        elif not all(map(is_sleeping, self.running())):
            self.awake = now
        if now - self.awake > HANGS_AFTER or (not self.has_reached and now - self.started > TRAINED_WITHIN):
            self.kill()

    def is_put_aside(self) -> bool:
        """Return whether the run is over or seems to hang."""
        return self.is_over() or time.monotonic() - self.awake > PUT_ASIDE_AFTER

    def kill(self) -> None:
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.codes[pid] = None

    def is_over(self) -> bool:
        return len(self.codes) == RANKS

    def outcome(self) -> str:
        """Return the worst outcome of a rank. Raises RuntimeError if the run did not reach its end."""
        records = sum(1 for _ in self.directory.glob(f"*{SUFFIX}"))
        codes = set(self.codes.values())
        if not self.has_reached or records != RANKS * self.is_hooked or codes - {None, 0, -signal.SIGABRT}:
            raise RuntimeError(f"{records} records, exit codes {self.codes}: {self.log().read_text()}")
        shutil.rmtree(self.directory)
        return "hung" if None in codes else "aborted" if -signal.SIGABRT in codes else "ended"


def is_sleeping(pid: int) -> bool:
    """Return whether the main thread sleeps. Gloo's own threads wake up every few milliseconds."""
    return stat(pid)[0] == "S"


def start(name: str, is_hooked: bool) -> Run:
    """Fork the ranks. In a rank it never returns: the rank ends with SystemExit, like a script."""
    run = Run(is_hooked, Path(tempfile.mkdtemp(dir="/dev/shm")))  # tmpfs, as in production
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, name, run)
            sys.exit()
        run.pids.append(pid)
    return run


def run_rank(rank: int, name: str, run: Run) -> None:
    """Run the script of a rank to its end."""
    log = os.open(run.log(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(RANKSCOPE_RUN_DIR=str(run.directory), GLOO_SOCKET_IFNAME="lo")
    if run.is_hooked:
        rankscope.instrument()
    mark = os.open(run.reached(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    dist.init_process_group("gloo", init_method=f"file://{run.directory}/store", rank=rank, world_size=RANKS)
    JOBS[name][0](lambda: mark_reached(mark))


def mark_reached(mark: int) -> None:
    """Mark that the last metric is next. All that follows decides whether the job hangs, and is only the script's."""
    os.write(mark, b".")


def runs(name: str, pairs: int) -> Iterator[Run]:
    """Yield all runs of a job, each when it is over. A run that hangs waits while the next one runs."""
    prepare(name)
    here, going = os.getpid(), list[Run]()
    try:
        for pair, index in itertools.product(range(pairs), range(2)):
            run = start(name, is_hooked=(pair + index) % 2 == 0)
            going.append(run)
            while not run.is_put_aside():
                time.sleep(0.01)
                for each in going:
                    each.check()
            yield from take_finished(going)
        while going:
            time.sleep(0.1)
            yield from take_finished(going)
    finally:
        if os.getpid() == here:  # not in a rank, which also gets here at its end
            for run in going:
                run.kill()


def take_finished(going: list[Run]) -> Iterator[Run]:
    """Remove and yield the runs that are over."""
    for run in going[:]:
        run.check()
        if run.is_over():
            going.remove(run)
            yield run


def prepare(name: str) -> None:
    """Import the ranks' modules. A process with several threads cannot be forked safely."""
    for module in JOBS[name][1]:
        importlib.import_module(module)
    probes.all_probes()
    probes.late_probes()
    torch.set_num_threads(1)
    assert attach.current() is None, "RANKSCOPE is set: the ranks without the hook would have it"
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "set OMP_NUM_THREADS=1: numpy has started threads"


def judge(name: str, pairs: int) -> dict[str, Any]:
    """Return how the runs of a job ended, with and without the hook, and the intervals of the difference."""
    counts: dict[bool, Counter[str]] = {kind: Counter() for kind in KINDS}
    began = time.monotonic()
    for run in runs(name, pairs):
        counts[run.is_hooked][run.outcome()] += 1
    figures: dict[str, Any] = {"job": name, "pairs": pairs, "seconds": round(time.monotonic() - began)}
    for kind, label in KINDS.items():
        figures[label] = {outcome: counts[kind][outcome] for outcome in OUTCOMES}
        figures[label] |= {f"{each}_interval": wilson(counts[kind][each], pairs) for each in ("hung", "aborted")}
    for each in ("hung", "aborted"):
        hooked, plain = counts[True][each], counts[False][each]
        figures[f"{each}_difference_interval"] = newcombe(hooked, plain, pairs)
        figures[f"{each}_p_likelier_with"], figures[f"{each}_p_different"] = fisher(hooked, plain, pairs)
    return figures


def row(job: dict[str, Any], outcome: str) -> list[str]:
    cells = [f"`{job['job']}`", outcome]
    for label in ("with", "without"):
        low, high = job[label][f"{outcome}_interval"]
        count = job[label][outcome]
        cells.append(
            f"{count} of {job['pairs']}: {100 * count / job['pairs']:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
        )
    low, high = job[f"{outcome}_difference_interval"]
    cells.append(f"[{100 * low:+.1f}, {100 * high:+.1f}]")
    return [*cells, f"{job[f'{outcome}_p_likelier_with']:.2f}", f"{job[f'{outcome}_p_different']:.2f}"]


def reading(job: dict[str, Any]) -> str:
    """Return the conclusion about runs that hung, and its uncertainty."""
    low, high = job["hung_difference_interval"]
    if low > 0 or high < 0:
        return f"- `{job['job']}`: **{'more' if low > 0 else 'fewer'} runs hang with the hook.**"
    return (
        f"- `{job['job']}`: no difference is shown. {job['pairs']} pairs do not exclude that the hook adds "
        f"up to {100 * high:.0f} runs in a hundred, or removes up to {-100 * low:.0f}."
    )


def body(jobs: list[dict[str, Any]]) -> list[str]:
    """Return the table and its conclusions."""
    head = ["job", "outcome", "with the hook", "without", "difference (points)", "p, likelier with", "p, different"]
    rows = [row(job, outcome) for job in jobs for outcome in ("hung", "aborted")]
    return [report.table(head, rows), "\n".join(map(reading, jobs))]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[200, 50], help="pairs of runs a job (default: 200 50)")
    parser.add_argument("--jobs", choices=JOBS, nargs="+", default=[*JOBS], help="default: all")
    options = parser.parse_args()
    pairs = dict(zip(options.jobs, itertools.cycle(options.pairs), strict=False))
    jobs = [judge(name, pairs[name]) for name in options.jobs]
    title, bound = "Jobs that hang at their end", "no more runs hang with the hook than without"
    report.Report("job_endings", title, __doc__, bound, body(jobs), jobs, ["torch"]).publish(options.save)


if __name__ == "__main__":
    main()
