"""The pages /metrics, /-/healthy, /-/ready, /-/release and /-/resume; 404 for other paths."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from fastapi.testclient import TestClient
from prometheus_client.core import Metric
from testing.families import family
from testing.judged_job import JudgedJob

from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.gpu.sampler import ReleaseError
from rankscope_exporter.web import limits
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.pages import PacedPages, SingleFlight


class Node:
    """A collector with one GPU that is up."""

    name, help = "node", ""

    def collect(self) -> Iterable[Metric]:
        return [family("gpu_up", ({"gpu": "0", "uuid": "GPU-a"}, 1))]


class Gpus:
    """The sampler's interface for the pages; `stuck` is why it cannot release the GPUs."""

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


def test_an_exporter_that_has_not_read_the_gpus_is_not_ready() -> None:
    client = TestClient(create_app(Scrape([]), Gpus(is_ready=False)))
    assert client.get("/-/ready").status_code == 503
    assert client.get("/-/healthy").status_code == 200


def test_the_exporter_is_not_ready_while_gpus_are_released() -> None:
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
def test_a_release_needs_the_flag(client: TestClient, page: str) -> None:
    answer = client.post(page)
    assert answer.status_code == 403
    assert "--web.enable-lifecycle" in answer.text
    assert client.get("/-/ready").status_code == 200
    assert client.get(page).status_code == 405


def test_a_web_page_cannot_release_gpus() -> None:
    gpus = Gpus()
    client = TestClient(create_app(Scrape([]), gpus, has_lifecycle=True))
    assert client.post("/-/release", headers={"Origin": "https://example.org"}).status_code == 403
    assert gpus.released_for == []


@pytest.mark.parametrize("seconds", ["", "0", "-1", "nan", "inf", "86401", "soon"])
def test_an_invalid_release_time_is_rejected(seconds: str) -> None:
    gpus = Gpus()
    client = TestClient(create_app(Scrape([]), gpus, has_lifecycle=True))
    answer = client.post(f"/-/release?seconds={seconds}")
    assert answer.status_code == 400
    assert answer.text == f"seconds: {seconds!r} is not a number above 0 and up to 86400\n"
    assert gpus.released_for == []


def test_a_failed_release_reports_the_reason() -> None:
    client = TestClient(create_app(Scrape([]), Gpus(stuck="gpu-3: stuck"), has_lifecycle=True))
    answer = client.post("/-/release")
    assert (answer.status_code, answer.text) == (503, "not released: gpu-3: stuck\n")
    assert client.get("/-/ready").status_code == 200


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "/docs", "/openapi.json", "/-/", "/index.html"])
def test_other_paths_are_not_found(client: TestClient, path: str) -> None:
    assert client.get(path, follow_redirects=False).status_code == 404


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy"])
def test_head_is_allowed_and_post_is_not(client: TestClient, path: str) -> None:
    assert client.head(path).status_code == 200
    assert client.post(path).status_code == 405


def test_the_content_security_policy_allows_only_the_pages_script_and_this_exporter(client: TestClient) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    script = answer.text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", answer.text)


@pytest.mark.parametrize("base", ["/", "/gpu01/", "/a/proxy/gpu01/"])
def test_every_link_of_the_status_page_works_behind_a_proxy_that_strips_a_prefix(run_dir: Path, base: str) -> None:
    app = create_app(Scrape([Node()]), Gpus(), JudgedJob(run_dir).trained(12).reporter())
    client = TestClient(app)
    links = re.findall(r"""(?:href|src|action)=["']?([^"'> ]+)""", client.get("/").text)
    targets = {urljoin(base, link) for link in links if not urlsplit(link).netloc and not urlsplit(link).scheme}
    assert {f"{base}{page}" for page in ("metrics", "api/v1/runs", "-/healthy", "-/ready")} <= targets
    assert {client.get(target.removeprefix(base.rstrip("/"))).status_code for target in targets} == {200}


@pytest.mark.parametrize("url", ["/gpu01", "/gpu01/"])
@pytest.mark.parametrize("prefix", ["/gpu01", "/gpu01/"])
def test_the_links_lead_below_the_prefix_that_a_proxy_names(client: TestClient, prefix: str, url: str) -> None:
    page = client.get("/", headers={"X-Forwarded-Prefix": prefix}).text
    links = re.findall(r'<a href="([^"]*)"', page)
    assert {urljoin(url, link) for link in links} == {
        f"/gpu01/{page}" for page in ("metrics", "api/v1/runs", "-/healthy", "-/ready")
    }


@pytest.mark.parametrize(
    "prefix", ["", "/", "//evil.example", "https://evil.example", '/"><script>', "/a b", "/a//b", "/a, /b", "gpu01"]
)
def test_a_prefix_that_is_no_path_changes_no_link(client: TestClient, prefix: str) -> None:
    assert '<a href="metrics">' in client.get("/", headers={"X-Forwarded-Prefix": prefix}).text


BROWSER = """
const seen={};
const link=href=>({getAttribute:()=>href,setAttribute:(_,to)=>seen[href]=`${to}`});
const links=[link("metrics"),link("/gpu01/-/ready")];
globalThis.location=new URL(process.argv[1]);
globalThis.document={
  querySelectorAll:of=>of=="nav a"?links:[],querySelector:()=>({classList:{add(){}}}),addEventListener(){}};
globalThis.fetch=async to=>{seen.page=to;throw 0};
globalThis.setTimeout=async refresh=>{
  globalThis.setTimeout=()=>{};globalThis.clearTimeout=()=>{};
  await refresh();console.log(JSON.stringify(seen))};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to run the script")
@pytest.mark.parametrize(
    ("url", "page", "base"),
    [
        ("https://gpu01:10417/", "https://gpu01:10417/", "https://gpu01:10417/"),
        ("https://host/gpu01", "https://host/gpu01", "https://host/gpu01/"),
        ("https://host/gpu01/?a=b#c", "https://host/gpu01/?a=b", "https://host/gpu01/"),
        ("https://user:secret@host/", "https://host/", "https://host/"),
    ],
)
def test_the_script_reads_its_own_page_and_corrects_links_without_a_slash(
    client: TestClient, url: str, page: str, base: str
) -> None:
    script = client.get("/").text.partition("<script>")[2].partition("</script>")[0]
    done = subprocess.run(["node", "-e", BROWSER + script, url], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == {
        "page": page,
        "metrics": f"{base}metrics",
        "/gpu01/-/ready": urljoin(base, "/gpu01/-/ready"),
    }


def test_requests_during_a_rendering_share_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOW_PAGE_INTERVAL", 0.0)

    async def request_pages() -> list[str]:
        begun, may_finish, numbers = threading.Semaphore(0), threading.Semaphore(0), itertools.count(1)

        def make() -> str:
            begun.release()
            may_finish.acquire()
            return f"page {next(numbers)}"

        page = SingleFlight(make)
        first = asyncio.create_task(page.next())
        await asyncio.to_thread(begun.acquire)
        others = [asyncio.create_task(page.next()) for _ in range(5)]
        await asyncio.sleep(0)
        others.pop().cancel()  # a client that disconnects does not cancel the page of the others
        may_finish.release(2)
        return await asyncio.gather(first, *others)

    assert asyncio.run(request_pages()) == ["page 1"] + ["page 2"] * 4


def test_a_failed_rendering_does_not_affect_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOW_PAGE_INTERVAL", 0.0)

    async def request_pages() -> list[str | BaseException]:
        pages = iter([ZeroDivisionError("no page"), "a page"])

        def make() -> str:
            page = next(pages)
            if isinstance(page, Exception):
                raise page
            return str(page)

        page = SingleFlight(make)
        first = await asyncio.gather(page.next(), page.next(), return_exceptions=True)
        return [*first, await page.next()]

    *failed, succeeded = asyncio.run(request_pages())
    assert [repr(error) for error in failed] == ["ZeroDivisionError('no page')"] * 2
    assert succeeded == "a page"


@pytest.mark.parametrize(
    ("interval", "share", "renderings"),
    [(3600.0, 1.0, 1), (0.0, 1e-12, 1), (0.0, 1.0, 2)],
    ids=["interval", "share", "control"],
)
def test_a_page_is_not_rendered_before_its_interval_and_its_share_of_a_cpu_allow(
    monkeypatch: pytest.MonkeyPatch, interval: float, share: float, renderings: int
) -> None:
    monkeypatch.setattr(limits, "SLOW_PAGE_INTERVAL", interval)
    monkeypatch.setattr(limits, "SLOW_PAGE_SHARE", share)
    numbers = itertools.count(1)

    async def request_pages() -> list[str]:
        page = SingleFlight(lambda: f"page {next(numbers)}")
        tasks = [asyncio.create_task(page.next())]
        await tasks[0]
        tasks.append(asyncio.create_task(page.next()))
        done, _ = await asyncio.wait(tasks, timeout=0.3)
        return sorted(task.result() for task in done)

    assert asyncio.run(request_pages()) == ["page 1", "page 2"][:renderings]


@pytest.mark.parametrize(("interval", "answered"), [(3600.0, 1), (0.0, 4)], ids=["interval", "control"])
def test_requests_for_other_pages_proceed_one_after_another(
    monkeypatch: pytest.MonkeyPatch, interval: float, answered: int
) -> None:
    monkeypatch.setattr(limits, "REQUEST_INTERVAL", interval)
    passed: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        passed.append(scope["path"])

    async def request_pages() -> None:
        paced = PacedPages(app)
        gone = SimpleNamespace(is_lost=True)

        def request(path: str, connection: Any = None) -> asyncio.Task[None]:
            scope = {"type": "http", "path": path, "state": {"connection": connection}}
            return asyncio.create_task(paced(scope, None, None))  # type: ignore[arg-type]

        closed = [request("/closed", gone) for _ in range(9)]
        await asyncio.wait([*closed, *(request("/") for _ in range(4))], timeout=0.3)
        await request("/metrics")

    asyncio.run(request_pages())
    assert passed == ["/"] * answered + ["/metrics"]
