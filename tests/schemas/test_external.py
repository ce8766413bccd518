"""External endpoints: which addresses are accepted, and where a key may go."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.external import ExternalEndpoint, parse_url
from schemas.route import ModelRouteSpec

DECLARED = {"name": "out", "url": "https://api.example.com/v1", "model": "m"}


def external(**more: Any) -> ExternalEndpoint:
    return ExternalEndpoint.model_validate({**DECLARED, **more})


@pytest.mark.parametrize(("url", "origin", "path"), [
    ("https://api.example.com/v1", "https://api.example.com:443", "/v1"),
    ("http://10.0.0.9:11434/v1/", "http://10.0.0.9:11434", "/v1"),
    ("http://[::1]:8080", "http://[::1]:8080", ""),
])  # fmt: skip
def test_addresses(url: str, origin: str, path: str) -> None:
    assert (parse_url(url).origin, parse_url(url).path) == (origin, path)


@pytest.mark.parametrize(
    "url",
    [
        *("", "api.example.com", "ftp://a/v1", "https://", "https://a:99999/", "https://a/v1?x=1"),
        *(
            "https://me:secret@a/v1",
            "https://a b/",
            "https://a/\\r\\nx: y",
            "https://a/v1\n",
            "http://ä/",
        ),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        external(url=url)


def test_long_addresses_are_refused_with_the_limit() -> None:
    """Recorders believe no endpoint of more than 1,000 characters, and would lose all requests of such a gateway."""
    with pytest.raises(ValidationError, match="has 487 characters; DNS has at most 253"):
        external(url=f"https://{'a.' * 240}example/v1")
    with pytest.raises(ValidationError, match="at most 1000 characters"):
        external(url=f"https://example.com/{'v' * 1000}")
    longest = external(url=f"https://{'a.' * 120}example.com:8443/{'v' * 700}")
    assert len(parse_url(longest.url).origin) < 1000


@pytest.mark.parametrize(("url", "is_safe"), [
    ("https://api.example.com/v1", True),
    ("http://127.0.0.1:8080/v1", True),
    ("http://localhost:8080/v1", True),
    ("http://192.168.1.4:1234/v1", True),
    ("http://[fd00::4]:1234/v1", True),
    ("http://api.example.com/v1", False),
    ("http://8.8.8.8/v1", False), ("http://0.0.0.0/v1", False),
    ("http://localhost.example.com/v1", False),
])  # fmt: skip
def test_a_key_leaves_the_private_network_over_tls_only(url: str, is_safe: bool) -> None:
    assert external(url=url).key is None
    if is_safe:
        assert external(url=url, key="cloud").key == "cloud"
        return
    with pytest.raises(ValidationError, match="would get the key without TLS"):
        external(url=url, key="cloud")
    assert external(url=url, key="cloud", allowPlaintextKey=True).allow_plaintext_key


@pytest.mark.parametrize(("more", "why"), [
    ({"authorities": "no certificate"}, "expected certificates in PEM form"),
    ({"authorities": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"}, "cannot be read"),
    ({"allowPlaintextKey": True}, "allows nothing here"),
    ({"concurrency": 0}, "greater than or equal to 1"),
])  # fmt: skip
def test_settings_without_a_meaning_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        external(**more)


@pytest.mark.parametrize(("spec", "why"), [
    ({"backends": [{"external": "out"}]}, "external has no out; there are: none"),
    ({"backends": [{"deployment": "m"}], "external": [DECLARED]}, "neither a backend nor"),
    ({"backends": [{}]}, "either a deployment or an external endpoint"),
    ({"backends": [{"deployment": "m", "external": "out"}], "external": [DECLARED]}, "either a deployment or an external endpoint"),
    ({"backends": [{"external": "out"}], "external": [DECLARED, DECLARED]}, "external names out twice"),
    ({"backends": [{"deployment": "m"}], "routing": {"healthCheck": {"interval": "20s"}}}, "set it in the ModelDeployment"),
])  # fmt: skip
def test_routes_name_what_they_declare(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ModelRouteSpec.model_validate_json(json.dumps({"model": "chat", **spec}))
