"""Logging set-up for processes: one JSON object a line on stderr, fields from `extra`."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

from machinery.logring import Ring

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One line a record: time, level, logger, message, and the fields given as `extra`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # A field may not hide what every line says.
        taken = _STANDARD | line.keys()
        line.update({k: v for k, v in vars(record).items() if k not in taken})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup(process: str, level: str = "info", *, ring: Ring | None = None) -> None:
    """Log to stderr, and to a ring if there is one, from here on; `level` is debug, info, warning or error."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers += [] if ring is None else [ring]
    for handler in handlers:
        handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level.upper())
    # Each request of ours to etcd and to engines would be a line.
    for chatty in ("aiohttp.access", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
