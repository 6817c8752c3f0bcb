"""A certificate authority for TLS servers and clients."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority. Its own certificate is `ca.pem` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Rankscope test authority")
        certificate = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        (directory / "ca.pem").write_bytes(self._signed(certificate))

    def issue(
        self, name: str, *alternatives: str, encrypted: bool = False, ends_in: datetime.timedelta = DAY
    ) -> tuple[Path, Path]:
        """Write NAME.pem and NAME.key for `alternatives`: DNS and e-mail names, IP addresses, URIs.

        Replaces existing files.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([*map(_alternative, alternatives)])
        certificate = self._builder(_name(name), key, ends_in).add_extension(names, False)
        encryption: Any = serialization.NoEncryption()
        if encrypted:
            encryption = serialization.BestAvailableEncryption(b"secret")
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        paths = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        paths[0].write_bytes(self._signed(certificate))
        paths[1].write_bytes(key.private_bytes(pem, pkcs8, encryption))
        return paths

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, ends_in: datetime.timedelta = DAY
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - DAY).not_valid_after(now + ends_in)

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(text: str) -> x509.GeneralName:
    if "://" in text:
        return x509.UniformResourceIdentifier(text)
    if "@" in text:
        return x509.RFC822Name(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
