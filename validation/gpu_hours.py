"""Check whether lost GPU-hours and money are right at any evaluation interval and over an outage of Prometheus.

    python -m validation.gpu_hours --minutes 30 --save

One Prometheus for each interval scrapes ranks with known losses (half of their time), with the rules that render.py
makes for the interval and a price. In the middle it is killed, and started again after a while. The rules' sum is
compared with the true loss outside of the outage. The outage consists of the evaluations in which the sum did not grow,
because Prometheus needs two scrapes for a rate. `longer than away` is its duration minus the time that Prometheus was
down. The sum must not restart from zero.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path

import yaml
from deploy.prometheus import render
from deploy.prometheus.thresholds import Speed
from testing import report, servers
from testing.http_server import exposition, http_server

INTERVALS = (5, 15, 30, 60)  # seconds
RANKS = 4
SHARES = {"forward": 0.5, "data_wait": 0.3, "checkpoint": 0.15, "other": 0.05}
LOST = RANKS * (1 - SHARES["forward"])  # GPU-hours an hour
PRICE = 2.5
PAUSE_AT, PAUSE = 0.5, 0.15  # ratios of the run
SETTLED = 8  # intervals until every window is full, before and after the pause
HOURS, MONEY = "sum(run:rankscope_lost_gpu_hours:total)", "sum(run:rankscope_lost_money:total)"

Sample = tuple[float, float]


def series(now: float, began: float) -> Iterator[str]:
    """Yield the lines of an exporter about these ranks."""
    yield f"rankscope_exporter_time_seconds {now:.3f}"
    yield 'rankscope_exporter_build_info{version="0"} 1'
    for rank in range(RANKS):
        own = f'run="known",rank="{rank}"'
        yield f'rankscope_rank_info{{{own},group="0-3",node="node",uuid="GPU-{rank}"}} 1'
        yield f"rankscope_rank_up{{{own}}} 1"
        yield f"rankscope_rank_start_timestamp_seconds{{{own}}} {began:.3f}"
        yield f"rankscope_rank_last_progress_timestamp_seconds{{{own}}} {now:.3f}"
        yield f"rankscope_rank_steps_total{{{own}}} {now - began:.3f}"
        for phase, share in SHARES.items():
            yield f'rankscope_rank_phase_seconds_total{{{own},phase="{phase}"}} {share * (now - began):.6f}'


def configuration(directory: Path, interval: int, port: int) -> str:
    """Return the configuration of a Prometheus with the rules for this interval and the default evaluation interval."""
    price = directory / "price.yml"
    price.write_text(f"gpu_hour_price: {PRICE}\n")
    rules = directory / "rules.yml"
    rules.write_text(render.group(Speed(f"{interval}s", interval), own=price))
    scraped = {"job_name": "gpus", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": f"{interval}s", "scrape_timeout": f"{min(interval, 10)}s"},
            "rule_files": [str(rules)],
            "scrape_configs": [scraped],
        }
    )


def measure(interval: int, seconds: float, port: int) -> dict[str, float]:
    """Return the sum at one interval, and the true loss."""
    with tempfile.TemporaryDirectory() as name:
        prometheus = servers.prometheus(Path(name), configuration(Path(name), interval, port))
        began = time.time()
        prometheus.start()
        try:
            time.sleep(PAUSE_AT * seconds)
            prometheus.kill()
            killed = time.time()
            time.sleep(PAUSE * seconds)
            prometheus.start()
            away = time.time() - killed
            time.sleep(began + seconds - time.time())
            hours, money = (samples(prometheus, query, began, interval) for query in (HOURS, MONEY))
        finally:
            prometheus.stop()
    grew = sum(after > before for (_, before), (_, after) in pairwise(hours))
    pause = hours[-1][0] - hours[0][0] - grew * interval
    evaluated = grew * interval
    truth = LOST * evaluated / 3600
    return {
        "interval": interval,
        "evaluated": round(evaluated, 1),
        "pause": round(away, 1),
        "longer": round(pause - away, 1),
        "truth": round(truth, 5),
        "gpu_hours": round(increase(hours), 5),
        "error": round(increase(hours) / truth - 1, 5),
        "money_error": round(increase(money) / (PRICE * truth) - 1, 5),
    }


def samples(prometheus: servers.Prometheus, query: str, began: float, interval: int) -> list[Sample]:
    """Return each sum with the time of its evaluation, once the windows were full."""
    span = f"[{int(time.time() - began - SETTLED * interval)}s:1s]"
    (found,) = prometheus.query(f"timestamp(run:rankscope_lost_gpu_hours:total{{cause='data'}}){span}")
    times = sorted({float(value) for _, value in found["values"]})
    return [(when, _at(prometheus, query, when)) for when in times]


def _at(prometheus: servers.Prometheus, query: str, when: float) -> float:
    (found,) = prometheus.query(query.replace(")", f" @ {when})"))
    return float(found["value"][1])


def increase(found: Sequence[Sample]) -> float:
    """Return the difference of the last and the first sum."""
    return found[-1][1] - found[0][1]


def table(results: list[dict[str, float]]) -> str:
    heads = ["evaluation interval", "evaluated", "Prometheus away", "longer than away"]
    heads += ["lost GPU-hours", "by the rules", "error", "error of money"]
    rows = [
        [
            f"{one['interval']} s",
            f"{one['evaluated']:.0f} s",
            f"{one['pause']:.0f} s",
            f"{one['longer']:.0f} s",
            f"{one['truth']:.4f}",
            f"{one['gpu_hours']:.4f}",
            f"{100 * one['error']:+.2f}%",
            f"{100 * one['money_error']:+.2f}%",
        ]
        for one in results
    ]
    return report.table(heads, rows)


def main() -> int:
    """Measure all intervals at once and publish."""
    parser = report.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    began = time.time() - 3600

    def expose(scrape: BaseHTTPRequestHandler) -> None:
        exposition(series(time.time(), began))(scrape)

    with http_server(expose) as port, ThreadPoolExecutor(len(INTERVALS)) as pool:
        results = list(pool.map(lambda interval: measure(interval, 60 * options.minutes, port), INTERVALS))
    title, bound = "Lost GPU-hours, added up", "none"
    report.Report("gpu_hours", title, __doc__, bound, [table(results)], results).publish(options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
