"""The words that pass between the event loop and the worker thread. Values only; no mlx here."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen; a seed is always given, so that every run can be repeated."""

    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate, checked: the worker trusts every number in it."""

    id: int
    prompt: tuple[int, ...]
    # Detokenized before the first new token and not emitted. A completion continues its prompt, so
    # its first word keeps the leading blank that a detokenizer strips from the start of a text.
    primer: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this job any more."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Free the model and end the thread."""


Order: TypeAlias = Job | Cancel | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step added to one job; `text` is empty while a character or a stop word is open."""

    job_id: int
    token: int
    text: str
    finish: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The job was lost in the worker; the process goes on."""

    job_id: int
    reason: str


Event: TypeAlias = Piece | Fault
