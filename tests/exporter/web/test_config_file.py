"""What a web configuration file may say, and the one line that names what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.exporter.web.conftest import Authority

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
        ({"rate_limit": {"burst": 1}}, "rate_limit: unknown key"),
        ({"http_server_config": {"http3": True}}, "http_server_config.http3: unknown key"),
        ({"http_server_config": {"http2": "yes"}}, "http_server_config.http2: expected true or false"),
        ({"http_server_config": {"headers": {"Server": "x"}}}, "http_server_config.headers.Server: unknown key"),
        ({"http_server_config": {"headers": {"X-Frame-Options": "no"}}}, "X-Frame-Options: 'no' is none of"),
        ({"http_server_config": {"headers": {"X-XSS-Protection": "a\nb"}}}, "X-XSS-Protection: not printable"),
        ({"basic_auth_users": {"alice": "secret"}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"alice": HASH.replace("$10$", "$99$")}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {"alice": HASH.replace("zou", "zoa")}}, "basic_auth_users.alice: not a bcrypt hash"),
        ({"basic_auth_users": {7: HASH}}, "basic_auth_users.7: a user's name"),
        ({"basic_auth_users": {"a:b": HASH}}, "basic_auth_users.a:b: a user's name"),
    ],
)
def test_a_wrong_section_is_named(web_config: Write, sections: dict[str, Any], named: str) -> None:
    assert named in complaint(web_config(**sections))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"key_file": None}, "key_file: expected a text"),
        ({"cert": "inline"}, "cert: unknown key"),
        ({"cert_file": "missing.pem"}, "missing.pem: No such file"),
        ({"cert_file": "ca.pem"}, "cert_file, key_file: "),
        ({"key_file": "locked.key", "cert_file": "locked.pem"}, "cert_file, key_file: "),
        ({"min_version": "TLS10"}, "min_version: 'TLS10' is none of: TLS12, TLS13"),
        ({"min_version": "TLS13", "max_version": "TLS12"}, "min_version: TLS13 is above"),
        ({"client_auth_type": "RequireAnyClientCert"}, "client_auth_type: 'RequireAnyClientCert' is none of"),
        ({"client_auth_type": "RequireAndVerifyClientCert"}, "client_ca_file: missing"),
        ({"client_ca_file": "ca.pem"}, "client_auth_type: missing"),
        ({"client_auth_type": "VerifyClientCertIfGiven", "client_ca_file": "nowhere.pem"}, "client_ca_file: "),
        ({"client_auth_type": "VerifyClientCertIfGiven", "client_ca_file": "web.yml"}, "web.yml holds no certificate"),
        ({"client_allowed_sans": ["a"]}, "client_allowed_sans: needs"),
        ({"client_allowed_sans": "a"}, "client_allowed_sans: expected a list"),
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
