"""Reports of kernel panics: real panic strings of public threads, damaged files, links, and folders without rights."""

import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nodeagent.hardware.panic_reports import parse_panic, read_panics
from schemas.node import KernelPanic

CAPTURES = Path(__file__).parent / "captures" / "panics"
UNDERFLOW = '"completeMemory() prepare count underflow" @IOGPUMemory.cpp:550'
NAME = "panic-full-2026-08-09-034124.0002.panic"


def test_the_captured_reports() -> None:
    assert read_panics(CAPTURES) == (
        KernelPanic(at=datetime(2026, 7, 5, 8, 15, tzinfo=UTC), text=UNDERFLOW),
        KernelPanic(
            at=datetime(2026, 5, 7, 16, 13, 39, tzinfo=UTC),
            text="userspace watchdog timeout: no successful checkins from WindowServer (2 induced crashes) in 120 seconds",
        ),
        KernelPanic(at=datetime(2026, 4, 20, 0, 43, 22, tzinfo=UTC), text=UNDERFLOW),
    )
    assert len(read_panics(CAPTURES, most=1)) == 1


@pytest.mark.parametrize(("printed", "text"), [
    ("", ""),
    ("\0" * 100, ""),
    ('{"timestamp":"yesterday at noon"}\n{"panicString" : ', ""),
    ('{"panicString" : "panic(cpu 3): ' + "x\x1b[31m" * 200, "x[31m" * 32),
    ('{"panicString":"Kernel data abort.\\nmore"}', "Kernel data abort."),
])  # fmt: skip
def test_a_damaged_report_has_the_time_of_its_name(printed: str, text: str) -> None:
    panic = parse_panic(printed, "2026-08-09-034124")
    local = datetime(2026, 8, 9, 3, 41, 24).astimezone(UTC)
    assert panic == KernelPanic(at=local, text=text)
    assert parse_panic(printed, "2026-13-99-999999") is None


def test_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "JetsamEvent-2026-08-09-034124.ips").write_text("{}")
    (tmp_path / "panic-today.panic").write_text("{}")
    assert read_panics(tmp_path) == ()
    secret = tmp_path / "secret"
    secret.write_text('{"panicString":"a secret"}')
    (tmp_path / NAME).symlink_to(secret)
    os.mkfifo(tmp_path / NAME.replace("0002", "0003"))
    assert [panic.text for panic in read_panics(tmp_path)] == ["", ""]


CHILD = """
import _strptime, os, sys
from pathlib import Path
from nodeagent.hardware.panic_reports import read_panics
os.setuid(65534)
print([panic.text for panic in read_panics(Path(sys.argv[1]))])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "file_mode", "printed"), [
    (0o755, 0o644, "['boom']"), (0o755, 0o600, "['']"), (0o700, 0o644, "PermissionError"),
])  # fmt: skip
def test_what_the_role_account_may_read(mode: int, file_mode: int, printed: str) -> None:
    # Folders of pytest are closed to other users.
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o711)
        folder = Path(parent, "DiagnosticReports")
        folder.mkdir()
        (folder / NAME).write_text('{"panicString":"boom"}')
        (folder / NAME).chmod(file_mode)
        folder.chmod(mode)
        done = subprocess.run(
            (sys.executable, "-c", CHILD, str(folder)),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert printed in done.stdout + done.stderr
