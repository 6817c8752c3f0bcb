"""The pages: /metrics, /-/healthy, /-/ready, the status page, and 404 elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Iterable, Mapping, Sequence

import pytest
from fastapi.testclient import TestClient
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.gpu.sampler import ReleaseError
from rankscope_exporter.ranks.collectors.ranks import SKIP_REASONS, SKIPPED
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.pages import SingleFlight
from rankscope_exporter.web.status_page import LEFT_OUT, render_status

HOLDER = {"source": "slurm", "slurm_job_id": "4242", "slurm_job_name": "", "run": "digits", "rank": "10", "user": "eve"}


def family(name: str, *samples: tuple[Mapping[str, str], float]) -> Metric:
    """Return a gauge, or a counter if the name says so, with these samples."""
    labels = [*samples[0][0]] if samples else []
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(f"rankscope_{name.removesuffix('_total')}", "Help.", labels=labels)
    for values, value in samples:
        made.add_metric([*values.values()], value)
    return made


class Node:
    """A GPU that answers, one that does not, and a rank."""

    name, help = "node", ""

    def collect(self) -> Iterable[Metric]:
        gpu, rank = {"gpu": "0", "uuid": "GPU-a"}, {"run": "digits", "rank": "10"}
        other = {"run": "digits", "rank": "9"}
        phases = {"startup": 30.0, "forward": 6.0, "collective_wait": 2.0}
        return [
            family("gpu_up", (gpu, 1), ({"gpu": "1", "uuid": "GPU-b"}, 0)),
            family("gpu_info", ({**gpu, "name": "Simulated <H100>"}, 1)),
            family("gpu_state_info", ({**gpu, "state": "process_no_work"}, 1)),
            family("gpu_allocation_info", ({**gpu, **HOLDER}, 1)),
            family("rank_info", ({**rank, "pid": "77", "uuid": "GPU-a"}, 1), ({**other, "pid": "76", "uuid": ""}, 1)),
            family("rank_phase_since_timestamp_seconds", ({**rank, "phase": "data_wait"}, 40.0)),
            family("rank_phase_seconds_total", *(({**rank, "phase": phase}, s) for phase, s in phases.items())),
            family("rank_checkpoint_last_timestamp_seconds", (rank, 70.0)),
            family("rank_exit_info", ({**other, "reason": "killed"}, 1)),
            family("exporter_rank_files_skipped", ({"reason": "truncated"}, 0), ({"reason": "too_many_ranks"}, 3)),
        ]


class Gpus:
    """A sampler as the pages see it; `stuck` is why it cannot release."""

    def __init__(self, *, is_ready: bool = True, stuck: str = "") -> None:
        self.is_ready = is_ready
        self.is_released = False
        self.released_for: list[float] = []
        self._stuck = stuck

    def release(self, seconds: float) -> None:
        if self._stuck:
            raise ReleaseError(self._stuck)
        self.released_for.append(seconds)
        self.is_ready, self.is_released = False, True

    def resume(self) -> None:
        self.is_ready, self.is_released = True, False


@pytest.fixture
def client() -> TestClient:
    return TestClient(create_app(Scrape([Node()]), Gpus()))


def test_metrics_are_served_as_text(client: TestClient) -> None:
    answer = client.get("/metrics", headers={"Accept": "text/plain", "Accept-Encoding": "gzip"})
    assert answer.status_code == 200
    assert answer.headers["content-encoding"] == "gzip"
    assert 'rankscope_gpu_up{gpu="0",uuid="GPU-a"} 1.0' in answer.text


def test_metrics_are_served_as_openmetrics(client: TestClient) -> None:
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_a_live_exporter_is_healthy(client: TestClient) -> None:
    assert client.get("/-/healthy").status_code == 200


def test_an_exporter_that_has_not_read_its_gpus_is_not_ready() -> None:
    client = TestClient(create_app(Scrape([]), Gpus(is_ready=False)))
    assert client.get("/-/ready").status_code == 503
    assert client.get("/-/healthy").status_code == 200


def test_released_gpus_are_not_ready_until_they_are_taken_again() -> None:
    gpus = Gpus()
    client = TestClient(create_app(Scrape([]), gpus, has_lifecycle=True))
    answer = client.post("/-/release")
    assert (answer.status_code, answer.text) == (200, "released for 900 s, or until POST /-/resume\n")
    answer = client.get("/-/ready")
    assert (answer.status_code, answer.text) == (503, "not ready: the GPUs are released\n")
    assert client.get("/-/healthy").status_code == 200
    assert client.post("/-/resume").status_code == 200
    assert client.get("/-/ready").status_code == 200
    assert client.post("/-/release?seconds=60").status_code == 200
    assert gpus.released_for == [900, 60]


@pytest.mark.parametrize("page", ["/-/release", "/-/resume"])
def test_nobody_releases_gpus_unless_it_is_enabled(client: TestClient, page: str) -> None:
    answer = client.post(page)
    assert answer.status_code == 403
    assert "--web.enable-lifecycle" in answer.text
    assert client.get("/-/ready").status_code == 200
    assert client.get(page).status_code == 405


def test_a_web_page_in_somebodys_browser_cannot_release_gpus() -> None:
    gpus = Gpus()
    client = TestClient(create_app(Scrape([]), gpus, has_lifecycle=True))
    assert client.post("/-/release", headers={"Origin": "https://example.org"}).status_code == 403
    assert gpus.released_for == []


@pytest.mark.parametrize("seconds", ["", "0", "-1", "nan", "inf", "86401", "soon"])
def test_a_release_that_would_not_end_is_refused(seconds: str) -> None:
    gpus = Gpus()
    client = TestClient(create_app(Scrape([]), gpus, has_lifecycle=True))
    answer = client.post(f"/-/release?seconds={seconds}")
    assert answer.status_code == 400
    assert answer.text == f"seconds: {seconds!r} is no number above 0 and up to 86400\n"
    assert gpus.released_for == []


def test_a_release_that_is_not_possible_says_why() -> None:
    client = TestClient(create_app(Scrape([]), Gpus(stuck="gpu-3: stuck"), has_lifecycle=True))
    answer = client.post("/-/release")
    assert (answer.status_code, answer.text) == (503, "not released: gpu-3: stuck\n")
    assert client.get("/-/ready").status_code == 200


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "/docs", "/openapi.json", "/-/", "/index.html"])
def test_every_other_path_is_not_found(client: TestClient, path: str) -> None:
    assert client.get(path, follow_redirects=False).status_code == 404


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy"])
def test_head_is_answered_and_post_is_not(client: TestClient, path: str) -> None:
    assert client.head(path).status_code == 200
    assert client.post(path).status_code == 405


def test_the_status_page_shows_gpus_and_ranks_in_order() -> None:
    page = render_status(list(Node().collect()), now=100.0)
    assert page.index(">9<") < page.index(">10<")
    assert "data_wait, 60 s ago" in page
    assert "killed" in page
    assert "lost" in page


def test_the_status_page_says_who_holds_a_gpu_and_what_it_does() -> None:
    page = render_status(list(Node().collect()), now=100.0)
    assert "job 4242, run digits, rank 10, user eve" in page
    assert "process_no_work" in page


@pytest.mark.parametrize(("busy_seconds", "text"), [(7.5, "30 s ago"), (0.0, "not since 30 s ago")])
def test_the_status_page_does_not_say_that_a_gpu_was_busy_that_never_was(busy_seconds: float, text: str) -> None:
    gpu = {"gpu": "0", "uuid": "GPU-a"}
    values = {"gpu_up": 1.0, "gpu_busy_seconds_total": busy_seconds, "gpu_last_busy_timestamp_seconds": 70.0}
    page = render_status([family(name, (gpu, value)) for name, value in values.items()], now=100.0)
    assert f">{text}<" in page


def test_the_status_page_says_how_long_a_rank_waited_since_its_start_up_and_when_it_saved() -> None:
    page = render_status(list(Node().collect()), now=100.0)
    assert ">25%<" in page
    assert ">30 s ago<" in page


@pytest.mark.parametrize(
    ("steps", "passes", "marker", "shown"),
    [
        (7, 28, "optimizer", "7"),
        (0, 0, "", "0"),
        (0, 57, "", "0 in 57 backward passes"),
        (15, 115, "backward_pass", "15 (backward passes)"),
    ],
)
def test_the_status_page_says_if_nothing_but_backward_passes_tells_of_steps(
    steps: int, passes: int, marker: str, shown: str
) -> None:
    rank = {"run": "r", "rank": "0"}
    families = [
        family("rank_info", ({**rank, "pid": "7", "uuid": ""}, 1)),
        family("rank_settings_info", ({**rank, "step_marker": marker}, 1)),
        family("rank_steps_total", (rank, steps)),
        family("rank_micro_steps_total", (rank, passes)),
    ]
    assert f'<td class="n">{shown}</td>' in render_status(families)


PHASE_SECONDS = {"startup": 30.0, "forward": 6.0, "other": 2.0, "checkpoint": 2.0, "collective_wait": 0.0}
DEVICE_SECONDS = {"forward": 1.0, "collective_wait": 3.0, "checkpoint": 0.5}


def ranks_of_a_group(device: Mapping[str, Mapping[str, float]], alive: Sequence[str]) -> list[Metric]:
    """Ranks 0 and 1; `device` is the device's seconds by rank."""
    ranks = [{"run": "r", "rank": rank} for rank in ("0", "1")]
    host = [({**rank, "phase": phase}, spent) for rank in ranks for phase, spent in PHASE_SECONDS.items()]
    measured = [
        ({**rank, "phase": phase}, spent) for rank in ranks for phase, spent in device.get(rank["rank"], {}).items()
    ]
    living = [({**rank, "phase": "other"}, 99.0) for rank in ranks if rank["rank"] in alive]
    return [
        family("rank_info", *(({**rank, "pid": "7", "uuid": "", "group": "0-1"}, 1) for rank in ranks)),
        family("rank_phase_since_timestamp_seconds", *living),
        family("rank_phase_seconds_total", *host),
        family("rank_device_seconds_total", *measured),
    ]


@pytest.mark.parametrize(
    ("device", "alive", "shown"),
    [
        ({}, ["0", "1"], ["0% by the host", "0% by the host"]),
        # A fifth of the time after start-up was a checkpoint; of the rest three quarters were waiting.
        ({"0": DEVICE_SECONDS, "1": DEVICE_SECONDS}, ["0", "1"], ["60% by the device", "60% by the device"]),
        ({"0": DEVICE_SECONDS}, ["0", "1"], ["0% by the host", "0% by the host"]),
        ({"0": DEVICE_SECONDS}, ["0"], ["60% by the device", "0% by the host"]),
        ({"0": {"forward": 0.0}}, ["0"], ["0% by the device", "0% by the host"]),
    ],
    ids=["no device", "all measured", "one not measured", "one not measured that has ended", "nothing measured"],
)
def test_the_status_page_judges_by_the_clock_that_the_rules_judge_by(
    device: Mapping[str, Mapping[str, float]], alive: Sequence[str], shown: Sequence[str]
) -> None:
    page = render_status(ranks_of_a_group(device, alive), now=100.0)
    found = re.findall(r'<td class="n">(\d+%)</td><td class="">the (\w+)</td>', page)
    assert [f"{share} by the {clock}" for share, clock in found] == shown


def test_the_status_page_makes_each_familys_samples_once_and_of_no_other_family() -> None:
    class Counted(GaugeMetricFamily):
        made = 0

        @property
        def samples(self) -> list[Sample]:
            self.made += 1
            return [Sample(self.name, {"gpu": str(gpu), "uuid": f"GPU-{gpu}"}, 1.0) for gpu in range(8)]

        @samples.setter
        def samples(self, _: list[Sample]) -> None:
            """Metric sets it."""

    shown, other = Counted("rankscope_gpu_up", "Up."), Counted("rankscope_gpu_clock_hertz", "Clock.")
    assert ">7<" in render_status([shown, other])
    assert (shown.made, other.made) == (1, 0)


def test_the_status_page_counts_the_files_that_it_does_not_show() -> None:
    page = render_status(list(Node().collect()), now=100.0)
    assert "Files left out: 3 past the limit of ranks.<" in page
    assert "Files left out" not in render_status([])


def test_the_status_page_has_words_for_every_reason_to_leave_a_file_out() -> None:
    assert tuple(LEFT_OUT) == SKIP_REASONS


def test_the_status_page_says_whether_there_is_no_record_or_none_that_it_can_show() -> None:
    nothing = SKIPPED.family(dict.fromkeys(SKIP_REASONS, 0))
    old = SKIPPED.family({**dict.fromkeys(SKIP_REASONS, 0), "version": 4})
    assert "No rank has left a record on this machine." in render_status([nothing])
    page = render_status([old])
    assert "No rank is shown." in page
    assert "Files left out: 4 of another version of Rankscope." in page


def test_the_status_page_escapes_what_it_shows() -> None:
    page = render_status(list(Node().collect()), now=100.0)
    assert "Simulated &lt;H100&gt;" in page


def test_the_status_page_says_when_there_is_nothing() -> None:
    page = render_status([])
    assert "no NVIDIA driver answers" in page
    assert "No rank has left a record on this machine." in page


def test_the_status_page_says_that_the_gpus_are_released() -> None:
    page = render_status([GaugeMetricFamily("rankscope_exporter_gpus_released", "Released.", value=1)])
    assert "the GPUs are released" in page
    assert "no NVIDIA driver" not in page


def test_those_who_ask_while_a_page_is_made_get_the_next_one_together() -> None:
    async def asked() -> list[str]:
        begun, go_on, made = threading.Semaphore(0), threading.Semaphore(0), itertools.count(1)

        def make() -> str:
            begun.release()
            go_on.acquire()
            return f"page {next(made)}"

        page = SingleFlight(make)
        first = asyncio.create_task(page.next())
        await asyncio.to_thread(begun.acquire)
        meanwhile = [asyncio.create_task(page.next()) for _ in range(5)]
        await asyncio.sleep(0)
        meanwhile.pop().cancel()  # who leaves takes nobody else's page with him
        go_on.release(2)
        return await asyncio.gather(first, *meanwhile)

    assert asyncio.run(asked()) == ["page 1"] + ["page 2"] * 4


def test_a_page_that_fails_fails_for_those_who_asked_and_not_for_the_next() -> None:
    async def asked() -> list[str | BaseException]:
        pages = iter([ZeroDivisionError("no page"), "a page"])

        def make() -> str:
            page = next(pages)
            if isinstance(page, Exception):
                raise page
            return str(page)

        page = SingleFlight(make)
        first = await asyncio.gather(page.next(), page.next(), return_exceptions=True)
        return [*first, await page.next()]

    *failed, made = asyncio.run(asked())
    assert [repr(one) for one in failed] == ["ZeroDivisionError('no page')"] * 2
    assert made == "a page"
