"""What a web configuration file may say, and the one line that names what is wrong with it."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testing.authority import Authority

from rankscope_exporter.web.config_file import WebConfigError, load

Write = Callable[..., Path]

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"  # the one in exporter-toolkit's documentation
SERVER = {"cert_file": "server.pem", "key_file": "server.key"}


def complaint(path: Path) -> str:
    with pytest.raises(WebConfigError) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("")
    config = load(path)
    assert (config.tls, config.context, config.users, config.headers) == (None, None, {}, {})


def test_a_full_file_is_understood(authority: Authority, web_config: Write) -> None:
    tls = {**SERVER, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
    tls |= {"min_version": "TLS12", "max_version": "TLS13", "client_allowed_sans": ["prometheus"]}
    http = {"http2": True, "headers": {"X-Content-Type-Options": "nosniff"}}
    config = load(web_config(tls_server_config=tls, http_server_config=http, basic_auth_users={"alice": HASH}))
    assert config.tls is not None
    assert config.tls.cert_file == authority.directory / "server.pem"
    assert config.users == {"alice": HASH.encode()}
    assert config.headers == {"X-Content-Type-Options": "nosniff"}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"tls": {}}, "tls: unknown key"),
        ({"tls_server_config": []}, "tls_server_config: expected keys and values"),
        ({"rate_limit": {"interval": "1s", "burst": 20}}, "rate_limit: not supported: "),
        ({"http_server_config": {"http3": True}}, "http_server_config.http3: unknown key"),
        ({"http_server_config": {"http2": "perhaps"}}, "http_server_config.http2: expected true or false"),
        ({"http_server_config": {"headers": {"Server": "x"}}}, "http_server_config.headers.Server: unknown key"),
        ({"http_server_config": {"headers": {"X-Frame-Options": "no"}}}, "X-Frame-Options: 'no' is none of"),
        ({"http_server_config": {"headers": {"X-XSS-Protection": "a\nb"}}}, "X-XSS-Protection: not printable"),
        ({"basic_auth_users": {"alice": "secret"}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"alice": HASH.replace("$10$", "$99$")}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"alice": HASH.replace("zou", "zoa")}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"": HASH}}, "basic_auth_users.: a user's name"),
        ({"basic_auth_users": {"alice": None}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"a:b": HASH}}, "basic_auth_users.a:b: a user's name"),
    ],
)
def test_a_wrong_section_is_named(web_config: Write, sections: dict[str, Any], named: str) -> None:
    assert named in complaint(web_config(**sections))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"key_file": None}, "key_file: expected a text"),
        ({"cert": "inline"}, "cert: not supported: name a file: cert_file"),
        ({"key": "inline"}, "key: not supported: name a file: key_file"),
        ({"client_ca": "inline"}, "client_ca: not supported: name a file: client_ca_file"),
        ({"curve_preferences": ["X25519", "CurveP256"]}, "curve_preferences: not supported: "),
        ({"cert_filse": "server.pem"}, "cert_filse: unknown key"),
        ({"cert_file": ""}, "cert_file: expected a text"),
        ({"prefer_server_cipher_suites": "perhaps"}, "prefer_server_cipher_suites: expected true or false"),
        ({"cert_file": "missing.pem"}, "missing.pem: No such file"),
        ({"cert_file": "ca.pem"}, "cert_file, key_file: "),
        ({"key_file": "locked.key", "cert_file": "locked.pem"}, "cert_file, key_file: "),
        ({"min_version": "TLS10"}, "min_version: 'TLS10' is none of: TLS12, TLS13"),
        ({"min_version": "TLS13", "max_version": "TLS12"}, "min_version: TLS13 is above"),
        ({"client_auth_type": "RequireAnyClientCert"}, "client_auth_type: not supported: it accepts certificates"),
        ({"client_auth_type": "RequestClientCert"}, "client_auth_type: not supported: it accepts certificates"),
        ({"client_auth_type": "x"}, "client_auth_type: 'x' is none of"),
        ({"client_auth_type": "VerifyClientCertIfGiven"}, "client_ca_file: missing"),
        ({"client_auth_type": "RequireAndVerifyClientCert"}, "client_ca_file: missing"),
        ({"client_ca_file": "ca.pem"}, "client_auth_type: missing"),
        ({"client_auth_type": "VerifyClientCertIfGiven", "client_ca_file": "nowhere.pem"}, "client_ca_file: "),
        ({"client_auth_type": "VerifyClientCertIfGiven", "client_ca_file": "web.yml"}, "web.yml holds no certificate"),
        ({"client_allowed_sans": ["a"]}, "client_allowed_sans: needs"),
        ({"client_allowed_sans": "a"}, "client_allowed_sans: expected a list"),
        (
            {"cipher_suites": ["TLS_AES_128_GCM_SHA256"], "max_version": "TLS12"},
            "cipher_suites: none of them is of TLS 1.2",
        ),
        ({"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA2048"]}, "SHA2048' is none of"),
        ({"cipher_suites": ["TLS_RSA_WITH_RC4_128_SHA"]}, "cipher_suites: 'TLS_RSA_WITH_RC4_128_SHA' is none of"),
    ],
)
def test_a_wrong_tls_setting_is_named(
    authority: Authority, web_config: Write, changes: dict[str, Any], named: str
) -> None:
    authority.issue("locked", encrypted=True)
    text = complaint(web_config(tls_server_config={**SERVER, **changes}))
    assert text.startswith("tls_server_config.")
    assert named in text


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
def test_a_header_is_the_text_that_is_written_and_a_blank_one_is_unset(
    tmp_path: Path, written: str, text: str | None
) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"http_server_config:\n  headers:\n    X-XSS-Protection: {written}\n")
    assert load(path).headers == ({} if text is None else {"X-XSS-Protection": text})


def test_all_headers_of_the_format_can_be_set_together(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(
        "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: sameorigin\n    X-XSS-Protection: 0\n"
        "    Strict-Transport-Security: max-age=60; includeSubDomains\n    X-Content-Type-Options: nosniff\n"
        "    Content-Security-Policy: \"default-src 'self' *.example.net\"\n"
    )
    assert len(load(path).headers) == 5


def test_a_users_name_may_be_a_number_and_keys_may_be_merged(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users: &more\n  7: {HASH}\n  alice: {HASH}\n")
    assert set(load(path).users) == {"7", "alice"}
    path.write_text(f"basic_auth_users:\n  <<: {{7: {HASH}}}\n  alice: {HASH}\n")
    assert set(load(path).users) == {"7", "alice"}


@pytest.mark.parametrize("word", ["true", "false", "no", "On"])
def test_booleans_are_those_of_yaml(web_config: Write, tmp_path: Path, word: str) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"http_server_config: {{http2: {word}}}\n")
    load(path)


def test_every_cipher_suite_that_go_calls_secure_can_be_listed(authority: Authority, web_config: Write) -> None:
    suites = [f"TLS_ECDHE_{key}_WITH_AES_{mode}" for key in ("ECDSA", "RSA") for mode in ("128_CBC_SHA", "256_CBC_SHA")]
    suites += ["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", "TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"]
    suites += ["TLS_CHACHA20_POLY1305_SHA256"]
    config = load(web_config(tls_server_config={**SERVER, "cipher_suites": suites}))
    assert config.context is not None
    offered = {cipher["name"] for cipher in config.context.get_ciphers()}
    assert {"ECDHE-RSA-AES128-SHA", "ECDHE-RSA-CHACHA20-POLY1305", "TLS_AES_128_GCM_SHA256"} <= offered
    assert "ECDHE-RSA-AES128-GCM-SHA256" not in offered


def test_cipher_suites_of_tls_1_3_alone_are_tls_1_3_alone(authority: Authority, web_config: Write) -> None:
    config = load(web_config(tls_server_config={**SERVER, "cipher_suites": ["TLS_AES_128_GCM_SHA256"]}))
    assert config.context is not None
    assert config.context.minimum_version == ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("prefers", [True, False])
def test_the_order_of_the_cipher_suites_may_be_the_servers_or_the_clients(
    authority: Authority, web_config: Write, prefers: bool
) -> None:
    config = load(web_config(tls_server_config={**SERVER, "prefer_server_cipher_suites": prefers}))
    assert config.context is not None
    assert bool(config.context.options & ssl.OP_CIPHER_SERVER_PREFERENCE) is prefers


def test_a_certificate_needs_its_key(web_config: Write) -> None:
    assert complaint(web_config(tls_server_config={"cert_file": "server.pem"})) == "tls_server_config.key_file: missing"


def test_a_file_that_is_no_yaml_is_named_without_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("basic_auth_users:\n  alice: [" + HASH)
    assert complaint(path) == "not YAML at line 2"
    path.write_bytes(b"\xff")
    assert complaint(path) == "not UTF-8"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert complaint(tmp_path / "web.yml") == "No such file or directory"


def test_a_wrong_hash_is_never_shown(web_config: Write) -> None:
    assert "hunter2" not in complaint(web_config(basic_auth_users={"alice": "hunter2"}))
