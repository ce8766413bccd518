"""Each record is one line of JSON, whatever is in it."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from machinery.logging import JsonFormatter


def line(
    message: str, *arguments: object, extra: dict[str, Any] | None = None, level: int = logging.INFO
) -> dict[str, Any]:
    logger = logging.Logger("store.etcd.http.route")  # noqa: LOG001 - of the test's own, known to nobody
    record = logger.makeRecord(
        logger.name, level, "file.py", 1, message, arguments, None, extra=extra
    )
    text = JsonFormatter("gateway").format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_time_level_process_logger_message_and_fields() -> None:
    found = line("lease %s", "lost", extra={"lease": 7, "key": "a\nb"}, level=logging.WARNING)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning",
        "process": "gateway",
        "logger": "store.etcd.http.route",
        "message": "lease lost",
        "lease": 7,
        "key": "a\nb",
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(Path("/a"), "/a", id="path"),
        pytest.param({"a": (1, None)}, {"a": [1, None]}, id="nested"),
        pytest.param("grüße 日本", "grüße 日本", id="unicode"),
        pytest.param("\udcff", "\udcff", id="no-text"),
        pytest.param(b"x", "b'x'", id="bytes"),
    ],
)
def test_fields_of_any_type_are_written(value: object, expected: object) -> None:
    assert line("m", extra={"field": value})["field"] == expected


def test_a_field_does_not_hide_what_a_line_must_say() -> None:
    found = line("m", extra={"level": "mine", "logger": "mine", "time": "mine"})
    assert (found["level"], found["logger"]) == ("info", "store.etcd.http.route")
    assert found["time"] != "mine"


def test_setup_writes_lines_to_stderr_and_keeps_chatty_libraries_down() -> None:
    code = (
        "import logging; from machinery import logging as ours; ours.setup('p', 'debug');"
        "logging.getLogger('aiohttp.access').info('chatty');"
        "logging.getLogger('x').debug('fine');\n"
        "try: 1 / 0\nexcept ZeroDivisionError: logging.getLogger('x').exception('bad')"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    lines = [json.loads(text) for text in done.stderr.splitlines()]
    assert [found["message"] for found in lines] == ["fine", "bad"]
    assert "ZeroDivisionError" in lines[1]["traceback"]
    assert done.stdout == ""
