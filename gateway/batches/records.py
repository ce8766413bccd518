"""Files and batches as they are kept, and as OpenAI's API shows them. Values only."""

from typing import Final, Literal, TypeAlias

import msgspec

Json: TypeAlias = dict[str, object]
BatchStatus: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Paths that a batch may ask."""
WINDOW: Final = "24h"
WINDOW_S: Final = 24 * 3600
MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 4 << 20
_MAX_ERRORS: Final = 100


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an owner; its content lies beside the database under its id."""

    id: str
    owner: str
    """The identity of the API key; empty for clients without one."""
    filename: str
    purpose: str
    size: int
    created_s: int

    def body(self) -> Json:
        """Return the file as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
        }


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in the input of a batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of an owner."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    status: BatchStatus
    created_s: int
    metadata: dict[str, str] | None = None
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    ended_s: int | None = None
    cancelling_s: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    errors: tuple[LineError, ...] = ()

    @property
    def expires_s(self) -> int:
        """The time at which it ends, complete or not."""
        return self.created_s + WINDOW_S

    @property
    def is_running(self) -> bool:
        """True while requests of it may run."""
        return self.status == "in_progress"

    def with_errors(self, errors: list[LineError]) -> "StoredBatch":
        """Return the batch with the first of these errors."""
        return msgspec.structs.replace(self, errors=tuple(errors[:_MAX_ERRORS]))

    def body(self) -> Json:
        """Return the batch as OpenAI's API shows it."""
        ended = {
            name: self.ended_s if self.status == name else None
            for name in ("completed", "failed", "expired", "cancelled")
        }
        errors = [msgspec.to_builtins(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_s,
            "in_progress_at": self.in_progress_s,
            "expires_at": self.expires_s,
            "finalizing_at": self.finalizing_s,
            "completed_at": ended["completed"],
            "failed_at": ended["failed"],
            "expired_at": ended["expired"],
            "cancelling_at": self.cancelling_s,
            "cancelled_at": ended["cancelled"],
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch, as its input file has it."""

    number: int
    custom_id: str
    offset: int
    """The place of the line in the input file, in bytes."""
    length: int
    model: str


class _InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Fields(msgspec.Struct):
    model: str
    stream: bool | None = None


_LINES: Final = msgspec.json.Decoder(_InputLine)
_FIELDS: Final = msgspec.json.Decoder(_Fields)
_EXPECTED: Final = (
    'Expected {"custom_id": "...", "method": "POST", "url": "...", "body": {"model": "...", ...}}.'
)


def read_line(raw: bytes, endpoint: str) -> tuple[str, str] | LineError:
    """Return custom id and model of one line, or its error without the number."""
    try:
        line = _LINES.decode(raw)
        fields = _FIELDS.decode(line.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return LineError(code="invalid_json_line", message=f"{str(error)[:200]}. {_EXPECTED}")
    checks = (
        (not 0 < len(line.custom_id) <= 512, "custom_id", "It has 1 to 512 characters."),
        (line.method != "POST", "method", 'It must be "POST".'),
        (line.url != endpoint, "url", f"It must be {endpoint}, as the batch says."),
        (not fields.model, "body.model", "It names the model."),
        (bool(fields.stream), "body.stream", "Answers of a batch are whole; leave it out."),
    )
    for is_wrong, param, message in checks:
        if is_wrong:
            return LineError(code="invalid_request", message=message, param=param)
    return line.custom_id, fields.model


def request_body(raw: bytes) -> bytes:
    """Return the body of the request in a line that `read_line` accepts."""
    return bytes(_LINES.decode(raw).body)
