"""`--web.config.file`: TLS, basic auth and headers, in the format of the Prometheus exporters.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. An unsupported setting is an
error and never ignored; docs/security.md lists them.
"""

from __future__ import annotations

import logging
import math
import re
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rankscope_exporter.documents import DocumentError, read_document
from rankscope_exporter.web.tls import (
    CIPHER_SUITES,
    CLIENT_AUTH,
    TLS13_CIPHER_SUITES,
    VERSIONS,
    TlsError,
    TlsSettings,
    expires_at,
    server_context,
)

# Cost, salt, hash. The last four bits of the salt's last character are unused; bcrypt raises if they are not zero.
BCRYPT = re.compile(r"\$2[abxy]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
# The headers that exporter-toolkit can set, and the values that it accepts for them.
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
# Settings of exporter-toolkit that this exporter does not support: by key, or by key and value.
UNSUPPORTED = {
    "rate_limit": "the exporter has fixed limits",
    "tls_server_config.cert": "use cert_file",
    "tls_server_config.key": "use key_file",
    "tls_server_config.client_ca": "use client_ca_file",
    "tls_server_config.curve_preferences": "OpenSSL's defaults are used",
    "tls_server_config.client_auth_type: RequestClientCert": "it accepts unverified certificates",
    "tls_server_config.client_auth_type: RequireAnyClientCert": "it accepts unverified certificates",
    "tls_server_config.client_auth_type: RequireClientCert": "it accepts unverified certificates",
}
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

logger = logging.getLogger(__name__)


class WebConfigError(DocumentError):
    """An invalid web configuration. The text names the file and the key, and never contains a secret."""


class TextLoader(yaml.SafeLoader):
    """Loads every scalar as a string (numbers, dates, `on`), as Go does where it expects a string.

    A repeated key is an error, as in Go. PyYAML would ignore the first one, with all of its users.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - a class attribute in PyYAML, too
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the keys and values. Raises WebConfigError if a key is repeated."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if repeated := next((key for key in keys if keys.count(key) > 1), None):
            raise WebConfigError(f"{repeated}: repeated at line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class WebConfig:
    """The parsed file. Without TLS settings pages are served unencrypted, without users to every client."""

    tls: TlsSettings | None
    context: ssl.SSLContext | None
    users: Mapping[str, bytes]
    """bcrypt hashes by user name."""
    headers: Mapping[str, str]
    certificate_expires_at: float = math.inf
    """Unix time; infinity if unknown or without TLS."""


class WebConfigFile:
    """The configuration file, checked for changes with each request and each TLS handshake.

    Changed users, headers and certificates take effect without a restart; other TLS settings need one. If the file
    becomes invalid, the error is logged once, and the last valid configuration stays in use.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Load the file. Raises DocumentError if it is invalid."""
        self._path = path
        self._clock = clock
        self._logged_as_expired: WebConfig | None = None
        self._config = load(path)
        self._state = self._read_state()

    def current(self) -> WebConfig:
        """Return the newest valid configuration."""
        if (state := self._read_state()) != self._state:
            self._state = state
            try:
                self._replace(load(self._path))
            except DocumentError as error:
                logger.error("--web.config.file: reload failed; keeping the previous configuration: %s", error)
        self._log_if_expired()
        return self._config

    def _replace(self, config: WebConfig) -> None:
        if config.tls != self._config.tls:
            raise WebConfigError(f"{self._path}: tls_server_config: changed settings need a restart")
        self._config = config
        logger.info("--web.config.file: reloaded")

    def _log_if_expired(self) -> None:
        # Clients reject an expired certificate; the server only sees that they close the connection.
        tls, expiry = self._config.tls, self._config.certificate_expires_at
        if tls and expiry <= self._clock() and self._logged_as_expired is not self._config:
            self._logged_as_expired = self._config
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(expiry))
            logger.error("--web.config.file: certificate %s expired at %s UTC; scrapes fail", tls.cert_file, text)

    def _read_state(self) -> list[tuple[int, int, int] | None]:
        tls = self._config.tls
        return [_state(path) for path in (self._path, *(tls.files if tls else ()))]


def load(path: Path) -> WebConfig:
    """Read the file and the files that it names. Raises DocumentError."""
    return read_document(path, "YAML", _load, lambda document: _parse(document, path.parent))


def _load(text: str) -> object:
    return yaml.load(text, TextLoader)  # noqa: S506 - a SafeLoader


def _parse(document: object, directory: Path) -> WebConfig:
    top = _section("", document, ("tls_server_config", "http_server_config", "basic_auth_users"))
    tls = _tls(top.get("tls_server_config"), directory)
    try:
        context = server_context(tls) if tls else None
    except TlsError as error:
        raise TlsError(f"tls_server_config.{error}") from error
    users, headers = _users(top.get("basic_auth_users")), _headers(top.get("http_server_config"))
    return WebConfig(tls, context, users, headers, expires_at(tls) if tls else math.inf)


def _tls(value: object, directory: Path) -> TlsSettings | None:
    def path(field: str, given: object) -> Path:
        return directory / _text(field, given)

    suites = (*CIPHER_SUITES, *TLS13_CIPHER_SUITES)
    parsers: dict[str, Callable[[str, object], Any]] = {
        "cert_file": path,
        "key_file": path,
        "client_ca_file": path,
        "client_auth_type": lambda field, given: _one_of(field, given, CLIENT_AUTH),
        "client_allowed_sans": lambda field, given: frozenset(_text(field, name) for name in _list(field, given)),
        "min_version": lambda field, given: _one_of(field, given, VERSIONS),
        "max_version": lambda field, given: _one_of(field, given, VERSIONS),
        "cipher_suites": lambda field, given: tuple(_one_of(field, name, suites) for name in _list(field, given)),
        "prefer_server_cipher_suites": _boolean,
    }
    values = _section("tls_server_config", value, parsers)
    if not values:
        return None
    for key in ("cert_file", "key_file"):
        if key not in values:
            raise WebConfigError(f"tls_server_config.{key}: missing")
    return TlsSettings(**{key: parsers[key](f"tls_server_config.{key}", given) for key, given in values.items()})


def _users(value: object) -> dict[str, bytes]:
    users = {}
    for name, given in _section("basic_auth_users", value).items():
        field = f"basic_auth_users.{name}"
        if not isinstance(name, str) or not name or ":" in name:
            raise WebConfigError(f"{field}: a user name must be text without a colon")
        if not isinstance(given, str) or not BCRYPT.fullmatch(given):
            raise WebConfigError(f"{field}: not a bcrypt hash (make one with: htpasswd -nBC 10 {name!r})")
        users[name] = given.encode()
    return users


def _headers(value: object) -> dict[str, str]:
    section = _section("http_server_config", value, ("headers", "http2"))
    _boolean("http_server_config.http2", section.get("http2", "true"))
    headers = {}
    for name, given in _section("http_server_config.headers", section.get("headers"), HEADERS).items():
        field = f"http_server_config.headers.{name}"
        if not given:  # an empty value means unset
            continue
        allowed = HEADERS[name]
        text = _one_of(field, given, allowed) if allowed else _text(field, given)
        if not (text.isascii() and text.isprintable()):
            raise WebConfigError(f"{field}: not printable ASCII")
        headers[name] = text
    return headers


def _section(field: str, value: object, known: Collection[str] | None = None) -> dict[Any, Any]:
    """Return a section's keys and values; an empty section has none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WebConfigError(f"{field or 'the file'}: expected keys and values")
    for key in value:
        if known is not None and key not in known:
            where = f"{field}.{key}" if field else str(key)
            _check_supported(where, where)
            raise WebConfigError(f"{where}: unknown key; valid keys: {', '.join(known)}")
    return value


def _check_supported(field: str, known: str) -> None:
    """Raise WebConfigError with the reason if only exporter-toolkit supports the setting."""
    if reason := UNSUPPORTED.get(known):
        raise WebConfigError(f"{field}: not supported: {reason}")


def _boolean(field: str, value: object) -> bool:
    if not isinstance(value, str) or value.lower() not in BOOLEANS:
        raise WebConfigError(f"{field}: expected true or false")
    return BOOLEANS[value.lower()]


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise WebConfigError(f"{field}: expected text")
    return value


def _list(field: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise WebConfigError(f"{field}: expected a list")
    return value


def _one_of(field: str, value: object, known: Collection[str]) -> str:
    if _text(field, value) not in known:
        _check_supported(field, f"{field}: {value}")
        raise WebConfigError(f"{field}: {value!r} is not one of: {', '.join(known)}")
    return str(value)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
