"""Valid and invalid web configuration files: an error is one line that names the key."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testing.authority import Authority

from rankscope_exporter.documents import DocumentError
from rankscope_exporter.web.config_file import load

Write = Callable[..., Path]

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"  # the one in exporter-toolkit's documentation
SERVER = {"cert_file": "server.pem", "key_file": "server.key"}


def load_error(path: Path) -> str:
    with pytest.raises(DocumentError) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_an_empty_file_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("")
    config = load(path)
    assert (config.tls, config.context, config.users, config.headers) == (None, None, {}, {})


def test_a_file_with_all_sections_is_loaded(authority: Authority, web_config: Write) -> None:
    tls = {**SERVER, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
    tls |= {"min_version": "TLS12", "max_version": "TLS13", "client_allowed_sans": ["prometheus"]}
    http = {"http2": True, "headers": {"X-Content-Type-Options": "nosniff"}}
    config = load(web_config(tls_server_config=tls, http_server_config=http, basic_auth_users={"alice": HASH}))
    assert config.tls is not None
    assert config.tls.cert_file == authority.directory / "server.pem"
    assert config.users == {"alice": HASH.encode()}
    assert config.headers == {"X-Content-Type-Options": "nosniff"}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"tls": {}}, "tls: unknown key"),
        ({"tls_server_config": []}, "tls_server_config: expected keys and values"),
        ({"rate_limit": {"interval": "1s", "burst": 20}}, "rate_limit: not supported: "),
        ({"http_server_config": {"http3": True}}, "http_server_config.http3: unknown key"),
        ({"http_server_config": {"http2": "perhaps"}}, "http_server_config.http2: expected true or false"),
        ({"http_server_config": {"headers": {"Server": "x"}}}, "http_server_config.headers.Server: unknown key"),
        ({"http_server_config": {"headers": {"X-Frame-Options": "no"}}}, "X-Frame-Options: 'no' is not one of"),
        ({"http_server_config": {"headers": {"X-XSS-Protection": "a\nb"}}}, "X-XSS-Protection: not printable"),
        ({"basic_auth_users": {"alice": "secret"}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"alice": HASH.replace("$10$", "$99$")}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"alice": HASH.replace("zou", "zoa")}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"": HASH}}, "basic_auth_users.: a user name"),
        ({"basic_auth_users": {"alice": None}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"a:b": HASH}}, "basic_auth_users.a:b: a user name"),
    ],
)
def test_an_invalid_section_is_reported(web_config: Write, sections: dict[str, Any], expected: str) -> None:
    assert expected in load_error(web_config(**sections))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"key_file": None}, "key_file: expected text"),
        ({"cert": "inline"}, "cert: not supported: use cert_file"),
        ({"key": "inline"}, "key: not supported: use key_file"),
        ({"client_ca": "inline"}, "client_ca: not supported: use client_ca_file"),
        ({"curve_preferences": ["X25519", "CurveP256"]}, "curve_preferences: not supported: "),
        ({"cert_filse": "server.pem"}, "cert_filse: unknown key"),
        ({"cert_file": ""}, "cert_file: expected text"),
        ({"prefer_server_cipher_suites": "perhaps"}, "prefer_server_cipher_suites: expected true or false"),
        ({"cert_file": "missing.pem"}, "missing.pem: No such file"),
        ({"cert_file": "ca.pem"}, "cert_file, key_file: "),
        ({"key_file": "locked.key", "cert_file": "locked.pem"}, "cert_file, key_file: "),
        ({"min_version": "TLS10"}, "min_version: 'TLS10' is not one of: TLS12, TLS13"),
        ({"min_version": "TLS13", "max_version": "TLS12"}, "min_version: TLS13 is above"),
        ({"client_auth_type": "RequireAnyClientCert"}, "client_auth_type: not supported: it accepts unverified"),
        ({"client_auth_type": "RequireClientCert"}, "client_auth_type: not supported: it accepts unverified"),
        ({"client_auth_type": "RequestClientCert"}, "client_auth_type: not supported: it accepts unverified"),
        ({"client_auth_type": "x"}, "client_auth_type: 'x' is not one of"),
        ({"client_auth_type": "VerifyClientCertIfGiven"}, "client_ca_file: missing"),
        ({"client_auth_type": "RequireAndVerifyClientCert"}, "client_ca_file: missing"),
        ({"client_ca_file": "ca.pem"}, "client_auth_type: missing"),
        ({"client_auth_type": "VerifyClientCertIfGiven", "client_ca_file": "nowhere.pem"}, "client_ca_file: "),
        ({"client_auth_type": "VerifyClientCertIfGiven", "client_ca_file": "web.yml"}, "contains no certificate"),
        ({"client_allowed_sans": ["a"]}, "client_allowed_sans: needs"),
        ({"client_allowed_sans": "a"}, "client_allowed_sans: expected a list"),
        (
            {"cipher_suites": ["TLS_AES_128_GCM_SHA256"], "max_version": "TLS12"},
            "cipher_suites: no suite is of TLS 1.2",
        ),
        ({"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA2048"]}, "SHA2048' is not one of"),
        ({"cipher_suites": ["TLS_RSA_WITH_RC4_128_SHA"]}, "cipher_suites: 'TLS_RSA_WITH_RC4_128_SHA' is not one of"),
    ],
)
def test_an_invalid_tls_setting_is_reported(
    authority: Authority, web_config: Write, changes: dict[str, Any], expected: str
) -> None:
    authority.issue("locked", encrypted=True)
    text = load_error(web_config(tls_server_config={**SERVER, **changes}))
    assert text.startswith("tls_server_config.")
    assert expected in text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("0", "0"),
        ("1", "1"),
        ("1.50", "1.50"),
        ("0x1F", "0x1F"),
        ("on", "on"),
        ("true", "true"),
        ("2026-01-02", "2026-01-02"),
        ("1; mode=block", "1; mode=block"),
        ("'0'", "0"),
        ("", None),
        ("null", None),
        ("''", None),
    ],
)
def test_a_header_is_the_literal_text_and_an_empty_one_is_unset(tmp_path: Path, written: str, text: str | None) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"http_server_config:\n  headers:\n    X-XSS-Protection: {written}\n")
    assert load(path).headers == ({} if text is None else {"X-XSS-Protection": text})


def test_all_supported_headers_can_be_set_together(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(
        "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: sameorigin\n    X-XSS-Protection: 0\n"
        "    Strict-Transport-Security: max-age=60; includeSubDomains\n    X-Content-Type-Options: nosniff\n"
        "    Content-Security-Policy: \"default-src 'self' *.example.net\"\n"
    )
    assert len(load(path).headers) == 5


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        (f"basic_auth_users:\n  alice: {HASH}\nbasic_auth_users:\n  bob: {HASH}\n", "basic_auth_users", 1),
        (f"basic_auth_users:\n  alice: {HASH}\n  bob: {HASH}\n  alice: {HASH}\n", "alice", 2),
    ],
)
def test_a_repeated_key_is_an_error_that_contains_no_secret(tmp_path: Path, text: str, key: str, line: int) -> None:
    path = tmp_path / "web.yml"
    path.write_text(text)
    with pytest.raises(DocumentError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {key}: repeated at line {line}"


def test_a_user_name_may_be_a_number_and_keys_may_be_merged(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users: &more\n  7: {HASH}\n  alice: {HASH}\n")
    assert set(load(path).users) == {"7", "alice"}
    path.write_text(f"basic_auth_users:\n  <<: {{7: {HASH}}}\n  alice: {HASH}\n")
    assert set(load(path).users) == {"7", "alice"}


@pytest.mark.parametrize("word", ["true", "false", "no", "On"])
def test_yaml_booleans_are_accepted(web_config: Write, tmp_path: Path, word: str) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"http_server_config: {{http2: {word}}}\n")
    load(path)


def test_gos_secure_cipher_suites_are_accepted(authority: Authority, web_config: Write) -> None:
    suites = [f"TLS_ECDHE_{key}_WITH_AES_{mode}" for key in ("ECDSA", "RSA") for mode in ("128_CBC_SHA", "256_CBC_SHA")]
    suites += ["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", "TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"]
    suites += ["TLS_CHACHA20_POLY1305_SHA256"]
    config = load(web_config(tls_server_config={**SERVER, "cipher_suites": suites}))
    assert config.context is not None
    offered = {cipher["name"] for cipher in config.context.get_ciphers()}
    assert {"ECDHE-RSA-AES128-SHA", "ECDHE-RSA-CHACHA20-POLY1305", "TLS_AES_128_GCM_SHA256"} <= offered
    assert "ECDHE-RSA-AES128-GCM-SHA256" not in offered


def test_only_tls_1_3_cipher_suites_require_tls_1_3(authority: Authority, web_config: Write) -> None:
    config = load(web_config(tls_server_config={**SERVER, "cipher_suites": ["TLS_AES_128_GCM_SHA256"]}))
    assert config.context is not None
    assert config.context.minimum_version == ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("prefers_server", [True, False])
def test_the_servers_cipher_preference_can_be_disabled(
    authority: Authority, web_config: Write, prefers_server: bool
) -> None:
    config = load(web_config(tls_server_config={**SERVER, "prefer_server_cipher_suites": prefers_server}))
    assert config.context is not None
    assert bool(config.context.options & ssl.OP_CIPHER_SERVER_PREFERENCE) is prefers_server


def test_a_certificate_needs_its_key(web_config: Write) -> None:
    path = web_config(tls_server_config={"cert_file": "server.pem"})
    assert load_error(path) == "tls_server_config.key_file: missing"


def test_invalid_yaml_is_reported_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("basic_auth_users:\n  alice: [" + HASH)
    assert load_error(path) == "not YAML at line 2"
    path.write_bytes(b"\xff")
    assert load_error(path) == "not UTF-8"


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    assert load_error(tmp_path / "web.yml") == "No such file or directory"


def test_an_invalid_hash_is_never_shown(web_config: Write) -> None:
    assert "hunter2" not in load_error(web_config(basic_auth_users={"alice": "hunter2"}))
