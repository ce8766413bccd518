"""What the worker thread needs of its neighbours, in its own words. Shapes only; no mlx here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nodeagent.engine.jobs import Event, Job


class Codec(Protocol):
    """The half of the tokenizer that makes prompts; read only, so other threads may call it."""

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Return a text's tokens."""
        ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return a conversation's tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The model is in memory."""

    codec: Codec
    vocab_size: int


class Listener(Protocol):
    """Whom the worker tells. Called in the worker's thread."""

    def on_ready(self, ready: Ready) -> None:
        """Hear that jobs may come."""
        ...

    def on_events(self, events: list[Event]) -> None:
        """Hear what a step made."""
        ...

    def on_end(self, error: Exception | None) -> None:
        """Hear that the thread is over; without an error if it was asked to be."""
        ...


class Runner(Protocol):
    """What runs jobs: the batch, in this file's words."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        ...

    def add(self, job: Job) -> list[Event]:
        """Let a job join."""
        ...

    def remove(self, job_id: int) -> list[Event]:
        """Take a job out, if it is still there."""
        ...

    def step(self) -> list[Event]:
        """Generate at most one token for every job."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...
