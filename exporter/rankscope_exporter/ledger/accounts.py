"""The accounts of all runs, and the journal of those that have ended: of an exporter's node, or of the analyzer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.ledger import journal
from rankscope_exporter.ledger.account import Account, account_from_json, pids_of
from rankscope_exporter.ledger.owner_files import OwnerFiles
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.process_usage import PROCFS, allowed_cpus
from rankscope_exporter.ranks.rank import Rank

ENDED_SHOWN_SECONDS = 600.0
"""How long a finding is returned after its end, as the records of ended ranks are."""
ENDED_LIMIT = 16
"""The most ended findings of a run that are kept."""


class Accounts:
    """The accounts of all runs: of present runs in the exporter's state, of ended runs in the journal."""

    def __init__(self, files: OwnerFiles | None, procfs: Path = PROCFS, absent_seconds: float = 0.0) -> None:
        """Set the files of the state directory; None for no journal.

        Restored runs that no update of the first `absent_seconds` has are over.
        """
        self._files = files
        self._journal = journal.Journal(files) if files else None
        self._procfs = procfs
        self._absent_seconds = absent_seconds
        self._began: float | None = None
        """The time of the first update."""
        self._accounts: dict[Run, Account] = {}
        self._saved: dict[Run, Account] = {}
        """Restored accounts of runs that have not been seen since the exporter's start."""
        self._ended: dict[Run, list[dict[str, Any]]] = {}
        """The findings that have ended, of present runs."""
        self._allowed: dict[int, frozenset[int]] = {}
        """The CPUs that each process may use, by pid."""

    def update(self, look: Look, resident: Mapping[int, float]) -> None:
        """Add one poll. `resident` is the memory of each process in bytes, by pid; of other machines, none is known."""
        ranks: dict[Run, list[Rank]] = defaultdict(list)
        for rank in look.scan.ranks:
            ranks[rank.run].append(rank)
        if self._files:
            self._files.set_on_gpu(_owners_on_gpus(look))
        verdicts = {verdict.run: verdict for verdict in look.judged.verdicts}
        pids = pids_of(look.scan.ranks)
        self._allowed = {pid: self._allowed.get(pid) or allowed_cpus(pid, self._procfs) for pid in pids}
        runs = [run for run, readings in look.readings.items() if readings]
        for run in runs:
            if run not in self._accounts:
                saved = self._saved.pop(run, None)
                self._accounts[run] = saved or Account(run[0], run[1], "".join(run[2:]))
            self._update(self._accounts[run], look, ranks.get(run, ()), verdicts.get(run), resident)
        self._finish([account for run, account in self._accounts.items() if run not in runs])
        self._accounts = {run: self._accounts[run] for run in runs}
        self._ended = {run: recent(ended, look.unix) for run, ended in self._ended.items() if run in runs}
        self._began = look.at if self._began is None else self._began
        if look.at - self._began >= self._absent_seconds:
            self._finish(self._saved.values())
            self._saved = {}

    def gpu_seconds(self) -> Iterator[tuple[Account, Mapping[str, float]]]:
        """Yield each present run's account, and its GPU seconds by cause so far."""
        for account in self._accounts.values():
            yield account, account.gpu_seconds()

    def findings(self) -> Iterator[Mapping[str, Any]]:
        """Yield the open findings of present runs, and those that have ended in the last minutes, with their `end`."""
        for run, account in self._accounts.items():
            yield from self._ended.get(run, ())
            yield from account.findings.values()

    def open_findings(self) -> Iterator[tuple[Account, Mapping[str, Any]]]:
        """Yield the open findings of present runs, each with its run's account."""
        for account in self._accounts.values():
            for entry in account.findings.values():
                yield account, entry

    def _finish(self, lost: Iterable[Account]) -> None:
        """Finish runs whose records are gone, as after a reboot. They ended when they were last seen."""
        for account in lost:
            if account.ended is None:
                self._append(account.owner, {**_journal_entry(account), "ended": account.at})

    def _update(
        self,
        account: Account,
        look: Look,
        ranks: Sequence[Rank],
        verdict: Verdict | None,
        resident: Mapping[int, float],
    ) -> None:
        was_over = account.ended is not None
        for entry in account.update(look, verdict):
            self._append(account.owner, {"entry": journal.FOUND, **entry})
            self._ended.setdefault(account.key, []).append(entry)
        if ranks:
            cpus = frozenset[int]().union(*(self._allowed[pid] for pid in pids_of(ranks)))
            account.describe(ranks, resident, len(cpus))
        if account.ended is not None and not was_over:
            self._append(account.owner, _journal_entry(account))

    def _append(self, owner: str, entry: Mapping[str, Any]) -> None:
        if self._journal:
            self._journal.append(owner, entry)

    def add_capture(self, run: Run, path: str, at: float) -> None:
        """Record in the journal where a run was captured."""
        training = "".join(run[2:])
        entry = {
            "entry": journal.CAPTURED,
            "run": run[0],
            "owner": run[1],
            "training": training,
            "at": at,
            "path": path,
        }
        self._append(run[1], entry)

    def state(self) -> list[Any]:
        """Return each run and its account as JSON values, the oldest run first."""
        accounts = sorted(self._accounts.values(), key=lambda account: account.began)
        return [[*account.key, asdict(account)] for account in accounts]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore one account that `state` returned. Raise one of saved.UNREADABLE if it is damaged."""
        account = account_from_json(state)
        self._saved[account.key] = account


def recent(ended: list[dict[str, Any]], unix: float) -> list[dict[str, Any]]:
    """Return the newest of the findings that have ended in the last minutes, each by its newest end."""
    return [entry for entry in ended if unix - entry["end"] < ENDED_SHOWN_SECONDS][-ENDED_LIMIT:]


def _owners_on_gpus(look: Look) -> Iterator[str]:
    """Yield the owners of ranks that the driver lists on a GPU."""
    pids = {pid for gpu in look.gpus.values() for pid in gpu.pids}
    for rank in look.scan.ranks:
        if rank.snapshot.lock_pid and rank.snapshot.lock_pid in pids:
            yield rank.run[1]


def _journal_entry(account: Account) -> dict[str, Any]:
    """Return the journal entry, without the large fields that only a running account needs."""
    entry = {"entry": journal.FINISHED, **asdict(account), "judged": {}}
    for use in entry["ranks"].values():
        use["divided"] = {}
    return entry
