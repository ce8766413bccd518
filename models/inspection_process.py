"""Inspects untrusted models in a child process with limits of memory and time. Must not import mlx.

Long-running processes (agents, reconcilers, dashboards) and fleetctl inspect through this module. An engine reads its
own model in its own process, which its agent watches. What is small is read at once: 1 MiB of headers takes 20 MB.
"""

import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from machinery import limited_child
from machinery.limited_child import ChildEnd, ChildLimits
from models import adapter_files, model_files, weight_headers
from models.adapter_files import AdapterFacts
from models.hf_config import ModelConfig
from models.model_files import ModelFacts, ModelUnusableError, TensorHeader, WeightTotals

_MODULE: Final = "models.inspection_process"
# 200,000 tensors take 250 MB and 3 s of a slow core; a busy machine, or a disk far away, may take long.
_LIMITS: Final = ChildLimits(memory_bytes=768 << 20, cpu_s=30, wall_s=90.0)
_SMALL_BYTES: Final = 1 << 20
MAX_HEADERS_BYTES: Final = 64 << 20
"""The headers of all weight files of a model on a hub."""

_LENGTH: Final = struct.Struct("<Q")
_T = TypeVar("_T")


class HeaderSummary(BaseModel):
    """The sums over all weight files of a model, and their headers."""

    weights: WeightTotals
    packed: str
    """config.json and the headers, packed; "" if they are too long, or a tensor has no shape."""


class _RemoteHeaders(BaseModel):
    """A model on a hub whose headers were fetched."""

    repo: str
    config: str
    files: tuple[tuple[str, int, int], ...]
    """Path, bytes of the file, and bytes of its header."""


class _Question(BaseModel):
    """The first part of what a child reads; raw headers follow."""

    kind: Literal["model", "adapter", "headers"]
    folder: str = ""
    headers: _RemoteHeaders | None = None


class _Reading(BaseModel):
    """A line before the answer: the child opens this file."""

    reading: str


class _Refusal(BaseModel):
    message: str
    reason: str


_MODEL: Final[TypeAdapter[ModelFacts | _Refusal]] = TypeAdapter(ModelFacts | _Refusal)
_ADAPTER: Final[TypeAdapter[AdapterFacts | _Refusal]] = TypeAdapter(AdapterFacts | _Refusal)
_SUMMARY: Final[TypeAdapter[HeaderSummary | _Refusal]] = TypeAdapter(HeaderSummary | _Refusal)


def inspect_model(folder: Path, limits: ChildLimits = _LIMITS) -> ModelFacts:
    """Return the facts in a model folder, as `model_files.inspect_model` does; may wait for a child.

    Raises:
        ModelUnusableError: a file is missing, truncated or invalid, or reading it needs more than the limits.

    """
    if model_files.parsed_bytes(folder) <= _SMALL_BYTES:
        return model_files.inspect_model(folder)
    found = _ask(_Question(kind="model", folder=str(folder)), about=folder, limits=limits)
    return _facts(_MODEL, found, folder)


def inspect_adapter(folder: Path) -> AdapterFacts:
    """Return the facts in an adapter folder, as `adapter_files.inspect_adapter` does; may wait for a child.

    Raises:
        ModelUnusableError: as for a model.

    """
    if model_files.parsed_bytes(folder) <= _SMALL_BYTES:
        return adapter_files.inspect_adapter(folder)
    found = _ask(_Question(kind="adapter", folder=str(folder)), about=folder)
    return _facts(_ADAPTER, found, folder)


def sum_headers(repo: str, config: str, files: Mapping[str, tuple[int, bytes]]) -> HeaderSummary:
    """Return the summary of a model on a hub, from its config.json and the size and header of each weight file.

    Raises:
        ModelUnusableError: a header is broken, or reading the headers needs more than the limits.

    """
    asked = _RemoteHeaders(
        repo=repo,
        config=config,
        files=tuple((path, size, len(raw)) for path, (size, raw) in files.items()),
    )
    joined = b"".join(raw for _, raw in files.values())
    if len(joined) <= _SMALL_BYTES:
        return _sum(asked, joined, lambda _: None)
    found = _ask(_Question(kind="headers", headers=asked), about=Path(repo), raw=joined)
    return _facts(_SUMMARY, found, Path(repo))


def _sum(asked: _RemoteHeaders, raw: bytes, note: Callable[[str], None]) -> HeaderSummary:
    by_file: dict[str, dict[str, TensorHeader]] = {}
    start, left = 0, model_files.MAX_TENSORS
    for name, size, length in asked.files:
        path = Path(asked.repo) / name
        note(str(path))
        header = raw[start : start + length]
        by_file[name] = model_files.parse_header(header, path, size, most=left)
        start, left = start + length, left - len(by_file[name])
    tensors = {
        name: one for tensor_headers in by_file.values() for name, one in tensor_headers.items()
    }
    packing = ModelConfig.model_validate_json(asked.config).quantization
    headers = weight_headers.make_headers(asked.config, by_file)
    return HeaderSummary(
        weights=model_files.total_weights(
            tensors, group_size=packing.group_size if packing is not None else None
        ),
        packed="" if headers is None else weight_headers.pack(headers),
    )


def _ask(
    question: _Question, *, about: Path, raw: bytes = b"", limits: ChildLimits = _LIMITS
) -> str:
    """Return the last line that a child writes. Raises ModelUnusableError: it reached a limit."""
    head = question.model_dump_json().encode()
    asked = _LENGTH.pack(len(head)) + head + raw
    try:
        outcome = limited_child.run(_MODULE, asked, limits)
    except OSError as error:
        raise ModelUnusableError(
            f"cannot look into {about}: no process could be started for it: {error.strerror}"
        ) from error
    lines = outcome.output.decode(errors="replace").splitlines() or [""]
    if outcome.end is ChildEnd.DONE:
        return lines[-1]
    raise ModelUnusableError(f"{_last_read(lines) or about} {_limit_text(outcome.end, limits)}")


def _last_read(lines: list[str]) -> str:
    """Return the file that the child opened last; a line may have been cut short."""
    for line in reversed(lines):
        try:
            return _Reading.model_validate_json(line).reading
        except ValidationError:
            continue
    return ""


def _limit_text(end: ChildEnd, limits: ChildLimits) -> str:
    if end is ChildEnd.TIME:
        return (
            f"takes more than {limits.cpu_s} s of a core, or {limits.wall_s:.0f} s, to read; "
            "is its disk connected, and is it a model's?"
        )
    if end is ChildEnd.MEMORY:
        limit = f"more than {limits.memory_bytes >> 20} MiB of memory"
        return f"takes {limit} to read: no published model does; fetch or convert it again"
    return "could not be read: the process that read it failed"


def _facts(adapter: TypeAdapter[_T | _Refusal], line: str, about: Path) -> _T:
    try:
        facts = adapter.validate_json(line)
    except ValidationError as error:
        raise ModelUnusableError(
            f"{about} could not be read: the process that read it wrote no answer"
        ) from error
    if isinstance(facts, _Refusal):
        raise ModelUnusableError(facts.message, reason=facts.reason)
    return facts


def _answer(raw: bytes, output: BinaryIO) -> None:
    """Write the answer to a question, behind a line for each file that is opened for it."""
    start = _LENGTH.size
    end = start + _LENGTH.unpack(raw[:start])[0]
    question = _Question.model_validate_json(raw[start:end])

    def note(path: str) -> None:
        line = _Reading(reading=path.encode(errors="replace").decode())
        output.write(line.model_dump_json().encode() + b"\n")
        output.flush()  # the next moment may be the last

    def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(question.folder):
            note(str(arguments[0]))

    try:
        if question.headers is not None:
            found = _SUMMARY.dump_json(_sum(question.headers, raw[end:], note))
        else:
            sys.addaudithook(note_opened)
            folder = Path(question.folder)
            if question.kind == "model":
                found = _MODEL.dump_json(model_files.inspect_model(folder))
            else:
                found = _ADAPTER.dump_json(adapter_files.inspect_adapter(folder))
    except ModelUnusableError as error:
        message = str(error).encode(errors="replace").decode()
        found = _Refusal(message=message, reason=error.reason).model_dump_json().encode()
    output.write(found + b"\n")


def main() -> None:
    """Answer the question on stdin."""
    limited_child.serve(_answer, _LIMITS)


if __name__ == "__main__":
    main()
