"""The command-line flags that say how clients reach a gateway: HTTPS with a certificate, or plain HTTP where it is safe."""

import ipaddress
from pathlib import Path
from typing import Final

from machinery.options import FILE, Option, options
from machinery.tls_server import CertificateError, ServerCertificate


class TransportError(Exception):
    """The flags do not say how clients reach the gateway; the message says which to give."""


def read_certificate(
    certificate: Path | None, key: Path | None, *, is_insecure: bool
) -> ServerCertificate | None:
    """Return the certificate of `--tls-cert` and `--tls-key`; None without them. `is_insecure`: --insecure-http.

    Raises:
        TransportError: the flags contradict each other, or a file cannot be used.

    """
    if (certificate is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise TransportError(f"{given} needs {missing} as well: a certificate and its key")
    if certificate is None or key is None:
        return None
    if is_insecure:
        raise TransportError("--tls-cert and --insecure-http contradict each other; keep one")
    try:
        return ServerCertificate(certificate.expanduser(), key.expanduser())
    except CertificateError as error:
        raise TransportError(f"--tls-cert, --tls-key: {error}") from error


def check_plain_http(address: str, *, is_insecure: bool) -> None:
    """Refuse plain HTTP on an IP address that other machines can reach, unless the operator insists.

    Raises:
        TransportError: the address needs a certificate.

    """
    if is_insecure or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    raise TransportError(
        f"other machines can reach {address}, and plain HTTP shows them keys, prompts and answers. Serve HTTPS with "
        "--tls-cert FILE --tls-key FILE, or with the gateway's identity (--identity-dir DIR); or give --insecure-http if a proxy serves HTTPS before this gateway, or you "
        "trust everything on the network"
    )


tls_flags: Final = options(
    "FLEET_GATEWAY",
    Option(
        "--tls-cert",
        "Certificate for clients (PEM), with intermediate certificates after it: the gateway serves HTTPS. "
        "Changed files are loaded without a restart.",
        type=FILE,
    ),
    Option("--tls-key", "Private key of --tls-cert (PEM), not readable by other users.", type=FILE),
    Option(
        "--insecure-http",
        "Serve plain HTTP on an address that other machines can reach. They can read keys and prompts.",
        is_flag=True,
    ),
)
"""Adds the options that say how clients reach the gateway."""
