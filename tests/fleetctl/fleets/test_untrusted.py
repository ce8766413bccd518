"""Messages about certificates that are not trusted, with their remedies."""

import ssl

from identity.peers import PeerError
from insight.process_client import untrusted_text


def test_a_revoked_certificate_is_not_blamed_on_its_authority() -> None:
    text = untrusted_text(PeerError("Revoked", "the certificate of node/mac-2 is revoked"))
    assert text.startswith("the certificate of node/mac-2 is revoked. Let it join again")
    assert "--gateway-ca" not in text


def test_an_unknown_authority_is() -> None:
    assert "--gateway-ca FILE" in untrusted_text(ssl.SSLCertVerificationError("unknown issuer"))


def test_another_error_has_no_message() -> None:
    assert untrusted_text(OSError("refused")) == ""
