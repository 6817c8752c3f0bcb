"""The page /api/v1/stacks: the Python stacks of the node's ranks of one run, if the operator allows it.

An answer sends a signal to the processes of the run. So it is made once for all clients that wait for the same run, of
one run at a time, and with a pause of STACKS_INTERVAL, whatever clients ask for. py-spy, which pauses processes, is not
used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from rankscope.cli.living_ranks import RecordedRank
from rankscope.cli.rank_stacks import StacksReport, ask_all, may_ask, read_rank_stacks
from rankscope.record.listing import take_turns
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.web import limits
from rankscope_exporter.web.pages import SingleFlight

if TYPE_CHECKING:
    from rankscope_exporter.web.config_file import WebConfig

STACKS = "/api/v1/stacks"
NOT_ALLOWED = "not allowed: the exporter runs without --web.enable-stacks"
OTHER_USER = "the exporter runs as another user than the rank, and not as root"
TOO_LARGE = f"left out: the answer has more than {limits.STACKS_BYTES // 1024**2} MiB"

logger = logging.getLogger(__name__)


class StackPages(SingleFlight):
    """Makes the answers, by run. A pause follows each: it cost the processes time, not only the exporter."""

    def earliest_after(self, _began: float) -> float:
        """Return the end of the pause that begins now."""
        return asyncio.get_running_loop().time() + limits.STACKS_INTERVAL


def add_stacks(app: FastAPI, scan: Callable[[], Scan | None] | None) -> None:
    """Add the page to the application. `scan` returns the ranks; None means that requests are rejected."""
    pages = StackPages(lambda run: as_json(collect(living_ranks_of(scan() if scan else None, run))))

    @app.get(STACKS)
    async def stacks(request: Request) -> Response:
        if scan is None:
            return JSONResponse({"error": NOT_ALLOWED}, status_code=403)
        run = request.query_params.get("run", "")
        if not living_ranks_of(scan(), run):
            return JSONResponse({"error": "no rank of this run is alive on this node"}, status_code=404)
        return Response(await pages.next(run), media_type="application/json")


def warn_of_open_stacks(hosts: Sequence[str], config: WebConfig | None) -> None:
    """Log a warning if clients on other machines need neither a password nor a certificate for the page."""
    has_certificates = config and config.context and config.context.verify_mode.name == "CERT_REQUIRED"
    is_local = all(ip_address(host).is_loopback for host in hosts)
    if not (is_local or has_certificates or (config and config.users)):
        logger.warning(
            "every client can read the stacks of ranks: --web.enable-stacks without a password or client certificates "
            "in --web.config.file"
        )


def living_ranks_of(scan: Scan | None, run: str) -> Sequence[RecordedRank]:
    """Return the living ranks of all runs with this name."""
    living = (one for one in (scan.ranks if scan else ()) if one.snapshot.alive)
    return [RecordedRank(one.snapshot, one.owner) for one in living if one.snapshot.info["run"] == run]


def collect(ranks: Sequence[RecordedRank]) -> StacksReport:
    """Ask ranks for their stacks, within limits of time and size in which each user has the same share."""
    turns = take_turns(ranks)
    share = limits.STACKS_SECONDS / max(1, len({one.owner for one in ranks}))
    asked = iter(ask_all([one for one in turns if may_ask(one)], share, with_py_spy=False))
    found, size = [], 0
    for one in turns:
        rank = next(asked) if may_ask(one) else read_rank_stacks(one, "", OTHER_USER)
        rank = replace(rank, text=rank.text[: limits.STACKS_OF_RANK])
        size += len(json.dumps(rank.text))
        found.append(rank if size <= limits.STACKS_BYTES else replace(rank, text="", reason=TOO_LARGE))
    return StacksReport(time.time(), found)
