"""The document in which an agent sends the findings about its machine."""

from datetime import UTC, datetime

import pytest

from schemas.wire.findings import (
    MAX_DOCUMENT_BYTES,
    MAX_FINDINGS,
    Finding,
    encode_findings,
    parse_findings,
)

SLEEPS = Finding(
    check="sleep", level="WARN", message="it may sleep", advice="sudo pmset -c sleep 0", node="mac-1",
    since=datetime(2026, 11, 22, 8, tzinfo=UTC), fix="power",
)  # fmt: skip


def test_findings_survive_the_document() -> None:
    found = (SLEEPS, Finding(check="disk", level="UNKNOWN", message="it cannot be read"))
    assert parse_findings(encode_findings(found)) == found


def test_a_document_never_has_more_findings_than_readers_accept() -> None:
    several = (SLEEPS,) * (MAX_FINDINGS + 1)
    assert len(parse_findings(encode_findings(several))) == MAX_FINDINGS


@pytest.mark.parametrize(("document", "why"), [
    (b'{"detail": "Not Found"}', "malformed"),
    (b'[{"check": "disk", "level": "GREAT", "message": ""}]', "0.level"),
    (b'[{"check": "disk", "level": "OK", "message": "%s"}]' % (b"x" * 2001), "0.message"),
    (b" " * (MAX_DOCUMENT_BYTES + 1), "256 KiB"),
    (b"[" * 100_000, "malformed"),
])  # fmt: skip
def test_other_documents_are_refused(document: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_findings(document)
