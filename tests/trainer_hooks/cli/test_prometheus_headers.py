"""Headers for a Prometheus that `rankscope explain` and `report` ask: a tenant, a token."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from testing.http_server import answers
from tests.trainer_hooks.cli.explaining import NOTHING, Server

from rankscope.cli import launch
from rankscope.cli.explaining.fetching import is_same_server

COMMANDS = (["explain"], ["report"], ["report", "--slurm-job", "7"], ["report", "--by", "user"])
Run = Callable[..., str]


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str], server: Server) -> Run:
    """Return a function that runs a command on the server, and returns the line of its error."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            launch.main([*arguments, "--url", f"http://{server.address}/prometheus"])
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix(f"rankscope {arguments[0]}: ").rstrip()

    return run


def values(server: Server, name: str) -> set[str | None]:
    """Return the values of a header in the requests to a server."""
    assert server.asked
    return {headers[name] for _, headers in server.asked}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_request_has_the_headers_of_the_command_line(error_of: Run, server: Server, command: list[str]) -> None:
    error_of(*command, "--header", "X-Scope-OrgID: tenant-a|tenant-b", "--header", "authorization:Bearer a.b:c== ")
    assert values(server, "X-Scope-OrgID") == {"tenant-a|tenant-b"}
    assert values(server, "Authorization") == {"Bearer a.b:c=="}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_request_has_the_headers_of_the_environment(
    error_of: Run, server: Server, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_PROMETHEUS_HEADERS", "X-Scope-OrgID: physics\n\nAuthorization: Bearer secret\n")
    error_of(*command)
    assert values(server, "X-Scope-OrgID") == {"physics"}
    assert values(server, "Authorization") == {"Bearer secret"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_headers_none_are_sent(error_of: Run, server: Server, command: list[str]) -> None:
    error_of(*command)
    assert values(server, "X-Scope-OrgID") == values(server, "Authorization") == {None}


def test_a_file_may_have_the_headers(
    error_of: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tenant").write_text("X-Scope-OrgID: physics\r\n")
    (tmp_path / "token").write_text("\nAuthorization: Bearer secret\n")
    monkeypatch.setenv("RANKSCOPE_PROMETHEUS_HEADERS", f"@{tmp_path}/tenant")
    error_of("explain", "--header", f"@{tmp_path}/token")
    assert values(server, "X-Scope-OrgID") == {"physics"}
    assert values(server, "Authorization") == {"Bearer secret"}


def test_the_command_line_replaces_a_header_of_the_environment_and_the_password_of_the_url(
    error_of: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_PROMETHEUS_HEADERS", "x-scope-orgid: physics")
    server.address = f"alice:secret@{server.address}"
    error_of("explain", "--header", "X-Scope-OrgID: biology", "--header", "AUTHORIZATION: Bearer abc")
    assert values(server, "X-Scope-OrgID") == {"biology"}
    assert values(server, "Authorization") == {"Bearer abc"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("X-Scope-OrgID physics", "'X-Scope-OrgID...' is not of the form 'Name: value'"),
        ("X-Scope-OrgID=secret", "'X-Scope-OrgID...' is not of the form 'Name: value'"),
        ("X-Scope-OrgID : secret", "'X-Scope-OrgID...' is not of the form 'Name: value'"),
        ("eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.secret", "'eyJhbGciOiJIUzI1NiIs...' is not of the form 'Name: value'"),
        (": secret", "'...' is not of the form 'Name: value'"),
        ("", "'...' is not of the form 'Name: value'"),
        ("X-Scope-OrgID: ", "X-Scope-OrgID: its value is empty"),
        ("X-Scope-OrgID: secret\r\nHost: b", "X-Scope-OrgID: its value is not printable ASCII"),
        ("X-Scope-OrgID: s\u00e9cret", "X-Scope-OrgID: its value is not printable ASCII"),
        ("@/nowhere/headers", None),
    ],
)
def test_a_wrong_header_is_named_and_its_value_is_not_shown(
    error_of: Run, server: Server, command: list[str], header: str, why: str | None
) -> None:
    error = error_of(*command, "--header", header)
    assert error == (f"--header: {why}" if why else f"--header {header}: No such file or directory")
    assert server.asked == []


def test_a_wrong_header_of_the_environment_or_of_a_file_names_its_source(
    error_of: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headers").write_text("X-Scope-OrgID: physics\nAuthorization Bearer secret\n")
    why = "'Authorization...' is not of the form 'Name: value'"
    assert error_of("explain", "--header", f"@{tmp_path}/headers") == f"--header @{tmp_path}/headers: {why}"
    monkeypatch.setenv("RANKSCOPE_PROMETHEUS_HEADERS", "Authorization Bearer secret")
    assert error_of("report") == f"RANKSCOPE_PROMETHEUS_HEADERS: {why}"
    assert server.asked == []


def test_a_report_that_asks_no_prometheus_reads_no_headers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANKSCOPE_PROMETHEUS_HEADERS", "nonsense")
    with pytest.raises(SystemExit):
        launch.main(["report", str(tmp_path)])
    assert "HEADERS" not in capsys.readouterr().err


def test_a_redirect_on_the_same_server_keeps_the_headers(error_of: Run, server: Server) -> None:
    def redirect(request: BaseHTTPRequestHandler) -> None:
        server.answer = answers(NOTHING)
        answers(b"", 301, Location=request.path.replace("/prometheus/", "/mimir/"))(request)

    server.answer = redirect
    error_of("explain", "--header", "X-Scope-OrgID: physics")
    assert {path for path, _ in server.asked} == {"/prometheus/api/v1/query", "/mimir/api/v1/query"}
    assert values(server, "X-Scope-OrgID") == {"physics"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_redirect_to_another_server_does_not_get_the_headers(
    error_of: Run, server: Server, another_server: Server, command: list[str]
) -> None:
    server.answer = answers(b"", 302, Location=f"http://{another_server.address}/api/v1/query")
    error_of(*command, "--header", "X-Scope-OrgID: physics", "--header", "Authorization: Bearer secret")
    assert values(server, "Authorization") == {"Bearer secret"}
    assert values(another_server, "X-Scope-OrgID") == values(another_server, "Authorization") == {None}


def test_a_redirect_to_another_server_and_back_does_not_get_the_headers(
    error_of: Run, server: Server, another_server: Server
) -> None:
    server.answer = answers(b"", 302, Location=f"http://{another_server.address}/api/v1/query")
    another_server.answer = answers(b"", 302, Location=f"http://{server.address}/stolen")
    error_of("explain", "--header", "Authorization: Bearer secret")
    assert {headers["Authorization"] for path, headers in server.asked if path == "/stolen"} == {None}


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("http://a/x", "http://a/y?z", True),
        ("http://a/x", "http://A:80/", True),
        ("http://a/", "https://a/", True),
        ("http://a:9090/", "https://a:9090/", False),
        ("http://a/", "https://a:8443/", False),
        ("http://a/", "http://b/", False),
        ("http://a/", "http://a.b/", False),
        ("http://a:9090/", "http://a:9091/", False),
    ],
)
def test_only_an_upgrade_to_https_changes_the_address_of_a_server(before: str, after: str, is_same: bool) -> None:
    assert is_same_server(before, after) is is_same
