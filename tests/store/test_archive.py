"""Tests of `store.archive`: round trips, and detection of every damaged file."""

import hashlib
import io
import json
from datetime import UTC, datetime

import pytest

from store.archive import (
    ArchiveEntry,
    ArchiveError,
    ArchiveHeader,
    ArchiveReader,
    ArchiveSummary,
    ArchiveWriter,
)

HEADER = ArchiveHeader(
    created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    fleet_version="0.1.0",
    etcd_version="3.5.16",
    store="123",
    revision=42,
    prefix="/p/",
)
ENTRIES = [
    ArchiveEntry(key="/p/a", value=b'{"text":"line\\nof \\"JSON\\""}'),
    ArchiveEntry(key="/p/b", value=b""),
    ArchiveEntry(key="/p/c", value="grüße 日本\n\u2028\x00".encode()),
    ArchiveEntry(key="/p/d", value=bytes(range(256))),
    ArchiveEntry(key=b"/p/\xff".decode("utf-8", "surrogateescape"), value=b"by hand"),
]


def written(
    entries: list[ArchiveEntry] = ENTRIES, header: ArchiveHeader = HEADER
) -> tuple[bytes, ArchiveSummary]:
    file = io.BytesIO()
    writer = ArchiveWriter(file, header)
    for entry in entries:
        writer.add(entry.key, entry.value)
    summary = writer.finish()
    return file.getvalue(), summary


def archive(entries: list[ArchiveEntry] = ENTRIES, header: ArchiveHeader = HEADER) -> bytes:
    return written(entries, header)[0]


def test_an_archive_can_be_read_repeatedly() -> None:
    reader = ArchiveReader(io.BytesIO(archive()))
    assert reader.header == HEADER
    for _ in range(2):
        assert list(reader.entries()) == ENTRIES
        assert reader.check().keys == len(ENTRIES)


def test_reader_and_writer_agree_on_the_summary() -> None:
    raw, summary = written()
    assert check(raw) == summary
    assert summary.sha256 == hashlib.sha256(raw).hexdigest()
    assert (summary.keys, summary.size_bytes) == (len(ENTRIES), len(raw))


def test_an_empty_store_has_a_backup_too() -> None:
    assert list(ArchiveReader(io.BytesIO(archive([]))).entries()) == []


def test_the_format_is_readable_lines_of_json() -> None:
    lines = archive().splitlines()
    assert json.loads(lines[0])["mlxFleetBackup"]["revision"] == 42
    assert json.loads(lines[1]) == {"key": "/p/a", "value": '{"text":"line\\nof \\"JSON\\""}'}
    assert json.loads(lines[4])["value64"].startswith("AAEC")
    assert set(json.loads(lines[-1])) == {"keys", "sha256"}


def check(raw: bytes) -> ArchiveSummary:
    return ArchiveReader(io.BytesIO(raw)).check()


def test_every_changed_byte_is_detected() -> None:
    raw = archive()
    for place in range(len(raw)):
        for byte in (raw[place] ^ 1, 10, 32):
            changed = raw[:place] + bytes([byte]) + raw[place + 1 :]
            # A space in the JSON of the last line does not change its meaning.
            if changed == raw or _says_the_same(changed, raw):
                continue
            with pytest.raises(ArchiveError):
                check(changed)


def _says_the_same(changed: bytes, raw: bytes) -> bool:
    last, before = changed.splitlines()[-1], raw.splitlines()[-1]
    return changed[: -len(last) - 1] == raw[: -len(before) - 1] and last.split() == before.split()


def test_every_truncation_is_detected() -> None:
    raw = archive()
    for end in range(len(raw)):
        with pytest.raises(ArchiveError):
            check(raw[:end])


def lines_of(raw: bytes) -> list[bytes]:
    return raw.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        pytest.param(b"", "not a backup", id="empty"),
        pytest.param(b"apiVersion: fleet/v1alpha1\n", "not a backup", id="a-manifest"),
        pytest.param(b'{"kind":"List"}\n', "not a backup", id="json"),
        pytest.param(
            b"\0" * 8 + b"\4" + b"\0" * 7 + b"\xed\xda\x0c\xed\2\0", "etcdutl", id="a-snapshot"
        ),
        pytest.param(b"".join(lines_of(archive())[:-1]), "cut short", id="without-its-end"),
        pytest.param(archive()[:-5], "cut short", id="cut"),
        pytest.param(archive() + b"{}\n", "was changed", id="more-after-its-end"),
        pytest.param(
            b"".join([*lines_of(archive())[:2], *lines_of(archive())[3:]]),
            "was changed",
            id="a-line-less",
        ),
        pytest.param(
            archive([ENTRIES[1], ENTRIES[0]]), "line 3: the key '/p/a'", id="out-of-order"
        ),
        pytest.param(archive([ENTRIES[0]] * 2), "line 3: the key '/p/a'", id="twice"),
        pytest.param(
            archive([ArchiveEntry(key="/q", value=b"")]), "line 2: the key '/q'", id="of-others"
        ),
        pytest.param(
            archive(header=HEADER.model_copy(update={"format": 2})),
            "a newer mlx-fleet wrote it (format 2, this one reads 1)",
            id="newer",
        ),
        pytest.param(
            archive().replace(b'"value"', b'"valeu"'), "line 2 was changed", id="misspelt"
        ),
        pytest.param(archive().replace(b"AAEC", b"A!EC"), "line 5 was changed", id="no-base64"),
    ],
)
def test_invalid_files_are_reported(raw: bytes, said: str) -> None:
    with pytest.raises(ArchiveError) as refusal:
        check(raw)
    assert said in str(refusal.value)
