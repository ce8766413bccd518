"""The log file of an engine: the beginnings of its runs, and the selection that is sent."""

import asyncio
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from machinery.process_log import LogSelection
from nodeagent.engines import engine_logs
from nodeagent.engines.engine_logs import find_run, new_run, stream_run
from tests.support.values import present

LARGE = 16 * 2**20 + 1


def write(folder: Path, text: str) -> None:
    with (folder / "engine.log").open("a") as file:
        file.write(text)


async def never() -> bool:
    return False


async def text(folder: Path, *, previous: bool = False, lines: int | None = None) -> str:
    run = present(find_run(folder, previous=previous))
    path, want = folder / run.file, LogSelection(lines=lines)
    sent = stream_run(path, run, want, SystemClock(), follow=False, is_over=never)
    return b"".join([piece async for piece in sent]).decode()


async def test_each_run_has_its_own_part(tmp_path: Path) -> None:
    assert find_run(tmp_path, previous=False) is None
    for number in (1, 2, 3):
        assert new_run(tmp_path) == tmp_path / "engine.log"
        write(tmp_path, f"run {number}\nend {number}\n")
    assert await text(tmp_path) == "run 3\nend 3\n"
    assert await text(tmp_path, lines=1) == "end 3\n"
    assert await text(tmp_path, lines=9) == "run 3\nend 3\n"
    assert await text(tmp_path, previous=True) == "run 2\nend 2\n"
    assert await text(tmp_path, previous=True, lines=1) == "end 2\n"


async def test_the_run_before_is_found_in_the_file_that_was_put_aside(tmp_path: Path) -> None:
    new_run(tmp_path)
    with (tmp_path / "engine.log").open("wb") as file:
        file.truncate(LARGE)
    write(tmp_path, "\nlast words\n")
    new_run(tmp_path)
    write(tmp_path, "new\n")
    assert await text(tmp_path) == "new\n"
    assert await text(tmp_path, previous=True, lines=1) == "last words\n"
    assert (tmp_path / "engine.log").stat().st_size == 4


@pytest.mark.parametrize(
    "noted", ["", "{", "[1]", '[["../secret", 0]]', '[["engine.log", 999]]', '{"a": 1}']
)
async def test_notes_that_make_no_sense_hide_nothing(tmp_path: Path, noted: str) -> None:
    write(tmp_path, "words\n")
    (tmp_path / "engine.runs").write_text(noted)
    assert await text(tmp_path) == "words\n"
    assert find_run(tmp_path, previous=True) is None
    new_run(tmp_path)
    assert await text(tmp_path) == ""


async def test_a_follower_gets_the_next_run_also_after_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_logs, "_LIMIT_BYTES", 8)
    new_run(tmp_path)
    write(tmp_path, "first run\n")
    run = present(find_run(tmp_path, previous=False))
    told = bytearray()
    log = tmp_path / "engine.log"
    async with asyncio.timeout(20):
        follow = stream_run(log, run, LogSelection(), SystemClock(), follow=True, is_over=never)
        async for piece in follow:
            told += piece
            if told == b"first run\n":
                write(tmp_path, "more\n")
                new_run(tmp_path)
                write(tmp_path, "second run\n")
            if told.endswith(b"second run\n"):
                break
        await follow.aclose()
    assert told == b"first run\nmore\nsecond run\n"


async def test_a_log_is_rotated_while_its_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_logs, "_LIMIT_BYTES", 20)
    folder = tmp_path / "qwen-0"
    folder.mkdir()
    new_run(folder)
    write(folder, "first run\n")
    new_run(folder)
    write(folder, "second run\n")
    engine_logs.rotate_all(tmp_path)
    assert await text(folder) == ""
    assert await text(folder, previous=True) == "first run\n"
    write(folder, "second goes on\n")
    assert await text(folder) == "second goes on\n"
    write(folder, "and on\n")
    engine_logs.rotate_all(tmp_path)
    write(folder, "to its end\n")
    assert await text(folder) == "to its end\n"
    new_run(folder)
    assert await text(folder, previous=True) == "to its end\n"
    assert {path.name for path in folder.iterdir()} == {"engine.log", "engine.log.1", "engine.runs"}


async def test_a_log_that_cannot_be_rotated_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_logs, "_LIMIT_BYTES", 8)
    (tmp_path / "a-0" / "engine.log").mkdir(parents=True)
    (tmp_path / "b-0").mkdir()
    write(tmp_path / "b-0", "many words\n")
    with pytest.raises(OSError, match="directory"):
        engine_logs.rotate_all(tmp_path)
    assert (tmp_path / "b-0" / "engine.log").stat().st_size == 0
