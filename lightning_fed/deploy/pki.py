"""Certificates, keys of nodes, and secrets: made here, never sent."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fed.store import durable

#: Days for which certificates are valid.
DAYS = 825


def write_private(path: Path, content: bytes) -> Path:
    """Write a file that only its owner can read.

    >>> from tempfile import mkdtemp
    >>> oct(write_private(Path(mkdtemp()) / "key", b"secret").stat().st_mode & 0o777)
    '0o600'
    """
    durable.remove(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path


def make_secret(path: Path) -> Path:
    """A random secret that SuperLink, or SuperNode, shares with the process that starts apps for it."""
    return write_private(path, secrets.token_bytes(32))


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """A certificate authority of its own, and a certificate for the server's names and addresses.

    ``ca.crt`` goes to every client; ``ca.key`` is only for further certificates, and may be kept elsewhere.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca_name = _name("lightning-fed federation CA")
    usage = {"digital_signature": False, "key_cert_sign": True, "crl_sign": True}
    ca = _builder(ca_name, ca_name, ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_usage(**usage), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    authority = _sign(ca.add_extension(identifier, critical=False), ca_key)
    own = _builder(_name(hosts[0]), ca_name, key.public_key())
    own = own.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    server_auth = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    own = own.add_extension(server_auth, critical=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    certificate = _sign(own.add_extension(signer, critical=False), ca_key)
    (folder / "ca.crt").write_bytes(_pem(authority))
    (folder / "server.crt").write_bytes(_pem(certificate))
    write_private(folder / "ca.key", _private(ca_key, openssh=False))
    write_private(folder / "server.key", _private(key, openssh=False))


def make_node_key(path: Path) -> Path:
    """A node's key, on the curve that Flower asks for, and ``.pub`` beside it, for the server to register."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, _private(key, openssh=True))
    openssh = serialization.PublicFormat.OpenSSH
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, openssh))
    return path


def check_public(content: bytes) -> None:
    """Refuse what is not the public key of a node, such as its private key.

    >>> check_public(b"-----BEGIN OPENSSH PRIVATE KEY-----")
    Traceback (most recent call last):
    ValueError: This is not the public key of a node. Give the node.pub that lightning-fed deploy init client made.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key: Any = load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(
            "This is not the public key of a node. Give the node.pub that lightning-fed deploy init client made."
        )


def _name(text: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: Any, issuer: Any, key: Any) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    return made.not_valid_after(now + datetime.timedelta(days=DAYS))


def _usage(**allowed: bool) -> Any:
    from cryptography import x509

    names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    rest = dict.fromkeys((*names, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(**rest, **allowed)


def _sign(builder: Any, key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA384())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _private(key: Any, openssh: bool) -> bytes:
    from cryptography.hazmat.primitives import serialization

    kind = serialization.PrivateFormat.OpenSSH if openssh else serialization.PrivateFormat.PKCS8
    return bytes(key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()))
