"""Certificate files for servers and clients with TLS, signed by an authority that exists for one test."""

from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from machinery.clock import SystemClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    certificate: Path
    key: Path


class Authority:
    """A certificate authority that exists for one test."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        made = (
            self._builder(self._name, self._key.public_key())
            .add_extension(constraints, critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, *, is_expired: bool = False
    ) -> x509.CertificateBuilder:
        now = SystemClock().now() - timedelta(hours=2 if is_expired else 0)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )

    def issue(self, name: str, *, cn: str = "", is_expired: bool = False) -> Identity:
        """Issue a certificate for 127.0.0.1, without host names, for servers and clients.

        It has no CN unless one is given: etcd with users refuses gateway clients whose certificate has one.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
        made = (
            self._builder(_subject(cn), key.public_key(), is_expired=is_expired)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(names, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        identity = Identity(
            certificate=self._folder / f"{name}.crt", key=self._folder / f"{name}.key"
        )
        identity.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        identity.key.touch(mode=0o600)
        identity.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return identity


def _subject(cn: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cn)] if cn else [])
