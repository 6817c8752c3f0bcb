"""One request to an HTTP server that may be hostile: limited in bytes and time, redirects only to http(s)."""

from __future__ import annotations

import ipaddress
import queue
import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPResponse
from types import MappingProxyType
from typing import NamedTuple, TypeVar

ANSWERS_WITHIN = 20.0  # seconds without a byte; a query takes milliseconds
BODY_LIMIT = 8 * 1024**2  # bytes: some 15,000 ranks
REFUSAL_LIMIT = 64 * 1024  # bytes of an error's body
REDIRECTS = 5
REDIRECTING = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
LOCAL_NAMES = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
"""The names of the loopback addresses in the /etc/hosts of Debian, Red Hat and their kin."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})

ResultT = TypeVar("ResultT")


class Answer(NamedTuple):
    """The answer of an HTTP server. `redirected` is the URL that gave it, if it is not the one that was asked."""

    status: int
    reason: str
    body: bytes
    redirected: str = ""


class FetchError(Exception):
    """The request failed; the text says why."""


def fetch(url: str, headers: Mapping[str, str] = NO_HEADERS) -> Answer:
    """GET a page, with `headers` until a redirect to another server.

    Raises FetchError, OSError, HTTPException or ValueError.
    """
    redirected = ""
    for _ in range(REDIRECTS + 1):
        request = urllib.request.Request(redirected or url)  # noqa: S310 - _target and Prometheus check the scheme
        for name, value in headers.items():
            request.add_unredirected_header(name, value)
        try:
            with _opened(request) as answer:
                if answer.status not in REDIRECTING:
                    return Answer(answer.status, answer.reason or "", _body(answer), redirected)
                target = _target(request.full_url, answer.headers.get("Location") or "")
        except (OSError, HTTPException, ValueError) as error:
            if redirected:
                raise FetchError(f"it redirects to {without_query(redirected)}: {reason_of(error)}") from None
            raise
        if not is_same_server(request.full_url, target):
            headers = NO_HEADERS  # another server must not get a password or a token
        redirected = target
    raise FetchError(f"it redirects more than {REDIRECTS} times")


def reason_of(error: Exception) -> str:
    """Return why a request failed."""
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason)


def without_query(url: str) -> str:
    """Return the URL as it may be shown: a login's query has the state of a session."""
    return url.partition("?")[0][:200]


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Return or raise what `work` does, in a thread that is abandoned after `seconds`. Raises TimeoutError then.

    A socket's timeout restarts with each byte, so a server that sends slowly could block it forever.
    """
    done: queue.Queue[tuple[ResultT | None, BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error there is a result


def proxy_of(url: str) -> str:
    """Return the environment's proxy for a URL; empty for this machine, for what NO_PROXY lists, or if unset."""
    parts = urllib.parse.urlsplit(url)
    host = urllib.parse.unquote(parts.hostname or "").rstrip(".")
    proxies = urllib.request.getproxies()
    if _is_loopback(host) or _is_exempt(host, parts.port or PORTS.get(parts.scheme, 0), proxies.get("no", "")):
        return ""
    return proxies.get(parts.scheme, "")


def _opened(request: urllib.request.Request) -> HTTPResponse:
    """Open the URL and return the answer of any status. The default opener would also open file:, ftp: and data:."""
    proxy = proxy_of(request.full_url)
    proxies = urllib.request.ProxyHandler({request.type: proxy} if proxy else {})
    opener = urllib.request.OpenerDirector()
    for handler in (proxies, urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
        opener.add_handler(handler)
    answer = opener.open(request, timeout=ANSWERS_WITHIN)
    if not isinstance(answer, HTTPResponse):
        raise OSError("neither http nor https")
    return answer


def _is_loopback(host: str) -> bool:
    """Return whether the host is this machine, which a proxy cannot reach."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))  # 127.1, 0x7f000001, 017700000001
        except OSError:
            return host in LOCAL_NAMES or host.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address  # ::ffff:127.0.0.1
    return mapped.is_loopback or mapped.is_unspecified


def _is_exempt(host: str, port: int, no_proxy: str) -> bool:
    """Return whether NO_PROXY lists a host: its name, a domain, its address or a network, maybe with a port, or `*`.

    urllib knows no networks, no IPv6 address without brackets and no `*.` in front of a domain; Go and curl do.
    """
    for entry in re.split(r"[,\s]+", no_proxy.lower()):
        if entry == "*":
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False):
                return True
        except ValueError:  # one of them is a name, or the entry has a port
            pass
        name, _, of_port = entry.rpartition(":") if re.search(r":\d+$", entry) else (entry, "", "")
        name = name.strip("[]").removeprefix("*").removeprefix(".")
        if name and f".{host}".endswith(f".{name}") and of_port in ("", str(port)):
            return True
    return False


def _body(answer: HTTPResponse) -> bytes:
    limit = BODY_LIMIT if answer.status == 200 else REFUSAL_LIMIT
    body = answer.read(limit + 1)
    if answer.headers.get("Content-Encoding", "").lower() in ("gzip", "x-gzip"):  # by a proxy, though not asked for
        try:
            body = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(body, limit + 1)
        except zlib.error:
            raise FetchError("its answer is not gzip, though it says so") from None
    if len(body) > limit and answer.status == 200:
        raise FetchError(f"its answer has more than {limit // 1024**2} MiB")
    return body[:limit]


def _target(url: str, location: str) -> str:
    """Return the target of a redirect. Raises FetchError if it is not allowed."""
    target = urllib.parse.urljoin(url, location)
    before, after = urllib.parse.urlsplit(url), urllib.parse.urlsplit(target)
    is_allowed = after.scheme in ("http", "https") and after.hostname and "@" not in after.netloc
    if not is_allowed or (before.scheme == "https" and after.scheme == "http"):
        raise FetchError(f"it redirects from {before.scheme} to {target[:200]!r}")
    return target


def is_same_server(before: str, after: str) -> bool:
    """Return whether a redirect stays on a server, or leads from http to https on one with the default ports."""
    (scheme, host, port), (new_scheme, new_host, new_port) = map(_server, (before, after))
    is_upgrade = (scheme, port, new_scheme, new_port) == ("http", 80, "https", 443)
    return host == new_host and (is_upgrade or (scheme, port) == (new_scheme, new_port))


def _server(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
