"""Trust of clients in servers' certificates: the authorities in a file, or those of the system."""

import ssl
from pathlib import Path
from typing import Literal, TypeAlias

Trust: TypeAlias = ssl.SSLContext | Literal[True]
"""The argument `ssl` of aiohttp; True: the system's authorities."""


class TrustError(Exception):
    """A file with authorities cannot be used; the message names it and says why."""


def read_trust(authorities: Path | None) -> Trust:
    """Return the trust in the authorities of a PEM file, and in no others; without a file, in those of the system.

    Raises:
        TrustError: the file cannot be used.

    """
    if authorities is None:
        return True
    try:
        return ssl.create_default_context(cafile=authorities)
    except ssl.SSLError as error:
        raise TrustError(
            f"{authorities} holds no certificate of an authority; expected PEM, which begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from error
    except OSError as error:
        raise TrustError(f"{authorities} cannot be read: {error.strerror or error}") from error


def untrusted_reason(error: Exception) -> str:
    """Return why a server's certificate was refused; empty if the error has another reason."""
    if not isinstance(error, ssl.CertificateError):
        return ""
    found = getattr(error, "certificate_error", error)
    return str(getattr(found, "verify_message", "") or found)
