"""The values and protocols between the worker thread and the event loop. Imports no mlx."""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.grammar.interface import GrammarCompiler
from engine.jobs import EmbedJob, Job, SpeechJob, WorkerEvent
from engine.memory.budget import MemoryBudget
from engine.model.pooler import PoolerConfig
from engine.text.codec import TextCodec
from engine.vision.image_reader import ImageRules
from schemas.wire.audio_limits import SpeechTask


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model in memory, as the event loop sees it."""

    codec: TextCodec
    vocab_size: int
    pooling: PoolerConfig | None = None
    """The pooler of an embedding model; None if the model makes no embeddings."""
    has_head: bool = True
    """True if it generates text; an embedding model does only if it has weights for the output head."""
    grammars: GrammarCompiler | None = None
    """The grammar compiler; None if the tokenizer does not support grammars."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Served names of LoRA adapters, and a name of the content of each."""
    image_rules: ImageRules | None = None
    """The images that requests may have; None if the model reads text only."""
    budget: MemoryBudget | None = None
    """The memory of requests; None does not limit it (only in tests)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpeech:
    """A model in memory that transcribes or speaks, as the event loop sees it."""

    task: SpeechTask
    voices: tuple[str, ...] = ()
    """The names of its voices, the default first; () for a transcriber."""
    languages: Mapping[str, str] = field(default_factory=dict)
    """Names of the languages that a transcriber understands, by code."""
    can_translate: bool = False
    """True if a transcriber can write foreign speech down in English."""


class WorkerListener(Protocol):
    """Receives the worker's reports. Called in the worker thread."""

    def on_met(self, lifelines: Mapping[int, socket.socket]) -> None:
        """Take over the lifelines, by rank, once all ranks of the group have joined."""
        ...

    def on_loading(self) -> None:
        """Note that the ranks are connected and loading begins."""
        ...

    def on_ready(self, model: ServedModel | ServedSpeech) -> None:
        """Note that jobs may be sent."""
        ...

    def on_events(self, events: list[WorkerEvent]) -> None:
        """Take the events of a step."""
        ...

    def on_end(self, error: Exception | None) -> None:
        """Note that the thread has ended; `error` is None if it was asked to end."""
        ...


class JobRunner(Protocol):
    """Runs jobs; implemented by the batch loop, and by the loop of speech."""

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        ...

    def add(self, job: Job | EmbedJob | SpeechJob) -> None:
        """Add a job at the next step."""
        ...

    def remove(self, job_id: int) -> None:
        """Remove a job at the next step, if it still runs."""
        ...

    def step(self) -> Iterator[list[WorkerEvent]]:
        """Generate at most one token for every job, read a piece of a prompt, or both; yield events as they are known."""
        ...

    def close(self) -> None:
        """Free all resources."""
        ...
