"""Output of commands, also of those that hang, and its parsing."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.hardware import system_text
from nodeagent.hardware.system_text import parse_pairs, parse_positive
from tests.support.values import present


async def test_output_is_returned_for_any_exit_code() -> None:
    assert (
        await system_text.command_output(("sh", "-c", "echo said; exit 1"), timeout_s=5) == "said\n"
    )


async def test_a_command_that_hangs_dies_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 60 & echo $! > {pids}; echo $$ >> {pids}; wait"
    assert await system_text.command_output(("sh", "-c", script), timeout_s=0.5) is None
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    await _until(lambda: not any(map(_is_running, started)))


async def test_a_cancelled_command_is_not_left_behind(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60"
    async with asyncio.TaskGroup() as group:
        task = group.create_task(system_text.command_output(("sh", "-c", script), timeout_s=30))
        await _until(pid.exists)
        task.cancel()
    await _until(lambda: not _is_running(int(pid.read_text())))


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - other processes do not set events
            await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"  # an orphan's zombie waits for init, which a container may not have


@given(text=st.text(), separator=st.sampled_from([":", "=", " "]))
def test_pairs_take_any_text(text: str, separator: str) -> None:
    assert all(separator not in key.strip() for key in parse_pairs(text, separator=separator))


@pytest.mark.parametrize(("text", "number"), [
    ("12", 12), (" 17490.", 17490), ("8:4:4", 8), ("0", None), ("-3", None), ("", None),
    (None, None),
])  # fmt: skip
def test_positive(text: str | None, number: int | None) -> None:
    assert parse_positive(text) == number


async def test_output_is_bounded() -> None:
    size = 3 * system_text.MAX_OUTPUT_BYTES
    printed = present(
        await system_text.command_output(("head", "-c", str(size), "/dev/zero"), timeout_s=30)
    )
    assert len(printed) == system_text.MAX_OUTPUT_BYTES
