"""TLS of the exporter's server, from the section `tls_server_config` of a web configuration file."""

from __future__ import annotations

import ipaddress
import math
import ssl
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

# Go's other policies accept unverified client certificates, which Python's ssl does not support.
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}  # older versions are insecure (RFC 8996)

# OpenSSL's names by Go's, which the file uses: the suites of TLS 1.2 that Go's crypto/tls calls secure.
CIPHER_SUITES = {
    f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
    for key in ("ECDSA", "RSA")
    for go, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
}
# TLS 1.3 always enables all of its suites, here as in Go: their names in the list have no effect.
TLS13_CIPHER_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl does not define


class TlsError(ValueError):
    """Invalid TLS settings. The text begins with the key."""


@dataclass(frozen=True)
class TlsSettings:
    """The section `tls_server_config`, with each value validated on its own."""

    cert_file: Path
    key_file: Path
    client_auth_type: str = "NoClientCert"
    client_ca_file: Path | None = None
    client_allowed_sans: frozenset[str] = frozenset()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that a TLS context is made from."""
        return (self.cert_file, self.key_file, *([self.client_ca_file] if self.client_ca_file else []))


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """Read the files and return the server's TLS context. Raises TlsError."""
    _check_combinations(settings)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = VERSIONS[settings.min_version], VERSIONS[settings.max_version]
    context.verify_mode = CLIENT_AUTH[settings.client_auth_type]
    context.set_alpn_protocols(["http/1.1"])
    context.num_tickets = 0  # Go's HTTP client resumes no session
    _choose_cipher_suites(context, settings)
    if settings.client_allowed_sans:
        context.sslobject_class = _require_client_name(settings.client_allowed_sans)
    _load_files(context, settings)
    return context


def _choose_cipher_suites(context: ssl.SSLContext, settings: TlsSettings) -> None:
    if not settings.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    suites = [CIPHER_SUITES[name] for name in settings.cipher_suites if name in CIPHER_SUITES]
    if suites:
        context.set_ciphers(":".join(suites))
    elif settings.cipher_suites and settings.max_version == "TLS12":
        raise TlsError("cipher_suites: no suite is of TLS 1.2, which is the max_version")
    elif settings.cipher_suites:
        context.minimum_version = ssl.TLSVersion.TLSv1_3


def expires_at(settings: TlsSettings) -> float:
    """Return the Unix time at which the certificate expires; infinity if it cannot be read.

    Python's ssl can only parse the certificate of a peer, so a client in this process reads it in a handshake.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(settings.cert_file, settings.key_file)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        client.load_verify_locations(settings.cert_file)
        for side in (client_side, server_side, client_side):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        return ssl.cert_time_to_seconds(str((client_side.getpeercert() or {})["notAfter"]))
    except (ssl.SSLError, ValueError, KeyError):  # e.g. not a server certificate; clients may accept it nevertheless
        return math.inf


def _check_combinations(settings: TlsSettings) -> None:
    verifies_clients = settings.client_auth_type != "NoClientCert"
    if verifies_clients and not settings.client_ca_file:
        reason = f"{settings.client_auth_type} with the machine's default authorities is not supported"
        raise TlsError(f"client_ca_file: missing: {reason}")
    if settings.client_ca_file and not verifies_clients:
        raise TlsError("client_auth_type: missing: with only a client_ca_file, no client is verified")
    if settings.client_allowed_sans and settings.client_auth_type != "RequireAndVerifyClientCert":
        raise TlsError("client_allowed_sans: needs client_auth_type: RequireAndVerifyClientCert")
    if settings.min_version > settings.max_version:
        raise TlsError(f"min_version: {settings.min_version} is above max_version {settings.max_version}")


def _load_files(context: ssl.SSLContext, settings: TlsSettings) -> None:
    # OpenSSL does not report which file it could not read, and prompts for the password of an encrypted key.
    for key, path in (("cert_file", settings.cert_file), ("key_file", settings.key_file)):
        _check_readable(key, path)
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        pair = f"{settings.cert_file} and {settings.key_file}"
        raise TlsError(f"cert_file, key_file: {pair} are not a certificate and its unencrypted key: {error}") from error
    if settings.client_ca_file:
        _check_readable("client_ca_file", settings.client_ca_file)
        try:
            context.load_verify_locations(settings.client_ca_file)
        except ssl.SSLError as error:
            raise TlsError(f"client_ca_file: {settings.client_ca_file} contains no certificate: {error}") from error


def _check_readable(key: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise TlsError(f"{key}: {path}: {error.strerror}") from error


def _require_client_name(allowed: frozenset[str]) -> type[ssl.SSLObject]:
    """Return a class whose handshake fails unless the client's certificate has one of the allowed names."""

    class NamedClient(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            certificate = self.getpeercert() or {}
            if allowed.isdisjoint(starmap(_as_in_go, certificate.get("subjectAltName", ()))):
                raise ssl.SSLCertVerificationError("no name of the client is in client_allowed_sans")

    return NamedClient


def _as_in_go(kind: str, name: str) -> str:
    """Return a name of a certificate as Go writes it: Python writes an IPv6 address in full and in capital letters."""
    try:
        return str(ipaddress.ip_address(name.strip())) if kind == "IP Address" else name
    except ValueError:  # an address of another length
        return name
