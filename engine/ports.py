"""What the parts of an engine need of each other, in their own words. Shapes only; no mlx here."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from engine.grammar.interface import GrammarCompiler
from engine.jobs import EmbedJob, Job, WorkerEvent
from engine.memory.budget import MemoryBudget
from engine.model.pooler import PoolerConfig
from engine.text.template_traits import TemplateTraits

Message: TypeAlias = dict[str, Any]  # one turn of a chat, as templates take it


class Detokenizer(Protocol):
    """One sequence's way from tokens to text; never yields half a character."""

    def add_token(self, token: int) -> None:
        """Take one token."""
        ...

    def finalize(self) -> None:
        """Give up waiting for the rest of a character."""
        ...

    @property
    def last_segment(self) -> str:
        """The text since this was last read."""
        ...


class Codec(Protocol):
    """The tokenizer; read only, so other threads than the worker may call it."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens which end a text."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        ...

    @property
    def traits(self) -> TemplateTraits:
        """How the model speaks: markers, calls, the template's variables."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Return a text's tokens."""
        ...

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return a conversation's tokens; `variables` (tools, ...) are the template's."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a fresh detokenizer."""
        ...

    def piece(self, token: int) -> bytes:
        """Return what one token alone spells, which may be half a character."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model is in memory."""

    codec: Codec
    vocab_size: int
    pooling: PoolerConfig | None = None
    """How it makes embeddings; None: it makes none."""
    has_head: bool = True
    """Whether it generates text; of embedding models, those do that bring weights for it."""
    grammars: GrammarCompiler | None = None
    """What constrains it; None: its tokenizer is of a kind that cannot be."""
    budget: MemoryBudget | None = None
    """What memory there is for requests; None: nobody counts it, in tests of other things."""


class WorkerListener(Protocol):
    """Whom the worker tells. Called in the worker's thread."""

    def on_met(self, lines: Mapping[int, socket.socket]) -> None:
        """Hear that all ranks of the group have come; take over their lifelines, by rank."""
        ...

    def on_loading(self) -> None:
        """Hear that the ranks are connected, and that the model is loaded from now on."""
        ...

    def on_ready(self, ready: ServedModel) -> None:
        """Hear that jobs may come."""
        ...

    def on_events(self, events: list[WorkerEvent]) -> None:
        """Hear what a step made."""
        ...

    def on_end(self, error: Exception | None) -> None:
        """Hear that the thread is over; without an error if it was asked to be."""
        ...


class JobRunner(Protocol):
    """What runs jobs: the batch, in this file's words."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        ...

    def add(self, job: Job | EmbedJob) -> None:
        """Let a job join at the next step."""
        ...

    def remove(self, job_id: int) -> None:
        """Take a job out at the next step, if it is still there."""
        ...

    def step(self) -> Iterator[list[WorkerEvent]]:
        """Generate at most one token for every job, or read a piece of a prompt, or both; yield what is known early."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...
