"""Requests for certificates that an enemy has written: a refusal with a reason, or a certificate, and little memory."""

import base64
import resource
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from identity.authority import (
    Authority,
    AuthorityError,
    addresses_of,
    load_certificate,
    new_key,
    read_request,
)
from identity.names import Identity, Role
from identity.proof import verify_proof
from identity.signing_controller import MAX_REQUEST_BYTES

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AUTHORITY = Authority.create(NOW)
GATEWAY = Identity(AUTHORITY.fleet, Role.GATEWAY, "edge")
_LINES = new_key(GATEWAY, ["192.0.2.7"])[1].decode().splitlines()
DER = base64.b64decode("".join(_LINES[1:-1]))


def pem(der: bytes) -> bytes:
    text = base64.encodebytes(der).decode()
    return f"{_LINES[0]}\n{text}{_LINES[-1]}\n".encode()


def mutated() -> st.SearchStrategy[bytes]:
    """Return requests in which bytes were changed, cut or repeated."""
    places = st.integers(0, len(DER) - 1)

    def change(changes: list[tuple[int, int]], cut: int, more: bytes) -> bytes:
        der = bytearray(DER)
        for place, value in changes:
            der[place] = value
        return pem(bytes(der[: len(der) - cut]) + more)

    return st.builds(
        change,
        st.lists(st.tuples(places, st.integers(0, 255)), max_size=6),
        st.integers(0, len(DER)) | st.just(0),
        st.binary(max_size=64),
    )


def _read(request: bytes) -> None:
    why = "signed, as it should be"
    try:
        AUTHORITY.sign(request, GATEWAY, NOW)
    except AuthorityError as error:
        why = str(error)
    assert 10 < len(why) < 300


@settings(max_examples=300)
@given(st.binary(max_size=2000) | mutated() | st.binary(max_size=500).map(pem))
@example(pem(DER.replace(b"\x02\x01\x00", b"\x02\x01\x01", 1)))  # a version that does not exist
@example(pem(b"\x30\x84\xff\xff\xff\xff"))  # a length of 4 GiB
@example(pem(b"\x30\x80" * 2000))  # nested without an end
@example(b"-----BEGIN CERTIFICATE REQUEST-----\n" * 400)
def test_a_request_is_signed_or_refused_with_a_sentence(request: bytes) -> None:
    _read(request)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(max_examples=100_000, deadline=None)
@given(st.binary(max_size=MAX_REQUEST_BYTES) | mutated())
def test_many_requests_are_signed_or_refused(request: bytes) -> None:
    _read(request)


def test_requests_take_little_memory() -> None:
    before = _peak_bytes()
    for size in (1 << 10, 16 << 10, 1 << 20, 8 << 20):
        _read(pem(b"\x30\x84\x7f\xff\xff\xff" + b"\x30\x80" * (size // 2)))
        _read(b"A" * size)
    assert _peak_bytes() - before < 100 << 20


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@given(st.lists(st.text(max_size=80) | st.ip_addresses().map(str), max_size=40))
def test_addresses_are_signed_or_refused_and_never_those_of_other_identities(
    addresses: list[str],
) -> None:
    try:
        leaf = AUTHORITY.sign(pem(DER), GATEWAY, NOW, addresses=addresses)
    except AuthorityError:
        return
    found = addresses_of(load_certificate(leaf.pem))
    assert {one for one in found if one.endswith("mlx-fleet.internal")} == {GATEWAY.dns_name}


@pytest.mark.parametrize("address", [
    "mac-1.node.mlx-fleet.internal",
    "MAC-1.node.MLX-fleet.internal",
    "mac-1.node.mlx-fleet.internal.",
    "*.node.mlx-fleet.internal", "*.mlx-fleet.internal", "*.internal", "mlx-fleet.internal",
])  # fmt: skip
def test_no_certificate_has_the_name_of_another_identity(address: str) -> None:
    leaf = AUTHORITY.sign(pem(DER), GATEWAY, NOW, addresses=[address])
    assert addresses_of(load_certificate(leaf.pem)) == {GATEWAY.dns_name}


@pytest.mark.parametrize("role", [Role.NODE, Role.ADMIN])
def test_nodes_and_administrators_get_no_addresses(role: Role) -> None:
    identity = Identity(AUTHORITY.fleet, role, "mac-1")
    leaf = AUTHORITY.sign(pem(DER), identity, NOW, addresses=["192.0.2.7", "fleet.example.com"])
    assert addresses_of(load_certificate(leaf.pem)) == {identity.dns_name}


@given(st.text(max_size=300), st.text(max_size=300))
def test_a_made_up_proof_proves_nothing(request: str, proof: str) -> None:
    leaf = AUTHORITY.sign(pem(DER), GATEWAY, NOW)
    assert not verify_proof(leaf.pem, request, proof)


def test_the_request_itself_is_valid() -> None:
    assert read_request(pem(DER)).curve.name == "secp256r1"
