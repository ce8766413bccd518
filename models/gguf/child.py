"""Asks the process that reads a GGUF file: a stranger's file is never parsed in the process of a command or an agent."""

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from machinery import limited_child
from machinery.limited_child import ChildEnd, ChildLimits
from models.gguf.file_reader import GgufRefusedError

# Headers of 128 MiB with 4 million texts take 600 MB. A model of 140 GB takes an hour on a slow core.
LIMITS: Final = ChildLimits(
    memory_bytes=1536 << 20, cpu_s=4 * 3600, wall_s=8 * 3600.0, output_bytes=1 << 40
)


class Question(BaseModel):
    """The file, and the folder to write; None to look into the file only."""

    source: Path
    into: Path | None = None


class Answer(BaseModel):
    """The result, or why there is none."""

    problem: str = ""
    result_bytes: int = 0


def look_into(source: Path) -> int:
    """Return the bytes that the MLX model of a GGUF file takes. Raises GgufRefusedError."""
    return _ask(Question(source=source)).result_bytes


def convert(source: Path, into: Path) -> None:
    """Write the MLX model of a GGUF file into a folder that does not exist. Raises GgufRefusedError."""
    _ask(Question(source=source, into=into))


def _ask(question: Question) -> Answer:
    try:
        outcome = limited_child.run("models.gguf", question.model_dump_json().encode(), LIMITS)
        answer = Answer.model_validate_json(outcome.output or b"{}")
    except (OSError, ValidationError) as error:
        raise GgufRefusedError(f"{question.source} could not be read: {error}") from error
    if outcome.end is ChildEnd.DONE and not answer.problem:
        return answer
    reasons = {
        ChildEnd.DONE: answer.problem,
        ChildEnd.MEMORY: f"{question.source} takes more than {LIMITS.memory_bytes >> 20} MiB of memory to read: no "
        "published model does; download it again",
        ChildEnd.TIME: f"{question.source} takes more than {LIMITS.cpu_s // 3600} hours of a core to read",
        ChildEnd.FAILED: f"{question.source} could not be read: the process that read it failed",
    }
    raise GgufRefusedError(reasons[outcome.end])
