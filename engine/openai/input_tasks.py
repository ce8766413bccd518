"""Tasks that prepare the input of requests, their results, and the port of what runs them. Pure values."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from engine.jobs import MediaInput
from engine.openai.request_body import GenerationRequest
from engine.vision.image_reader import ImageRules


class Lane(StrEnum):
    """A worker of its own, so that costly input delays only input of its kind."""

    SHORT = "short"
    """Texts that take a millisecond or two."""
    MEDIUM = "medium"
    """Texts of some pages, which take some tens of milliseconds at most."""
    LONG = "long"
    """Texts that take tenths of a second at most."""
    HUGE = "huge"
    """Longer texts."""
    GRAMMAR = "grammar"
    """Schemas and grammars that were not compiled before."""


LANES: Final = tuple(Lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt, ready for a job."""

    tokens: tuple[int, ...] = ()
    images: tuple[MediaInput, ...] = ()
    second_start: int = 0
    """Index of the first token of the second text of a pair; 0 if the model does not tell the two apart."""
    grammar: str | None = None
    """The grammar of the answers, which compiles within the limits; None if they have none, or it was not asked for."""
    system_tokens: int = 0
    """Tokens before the text of a chat's first user message; 0 if they were not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsTask:
    """Tokenizes the prompts of a request."""

    request: GenerationRequest
    context_length: int | None = None
    """A text that is certainly longer is refused before it is tokenized; None accepts any."""
    image_rules: ImageRules | None = None
    """None if the model reads text only."""
    counts_system: bool = False
    """True to count the tokens of a chat's system message and tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsTask:
    """Tokenizes the texts of a request for embeddings, or pairs of texts for scores."""

    texts: tuple[str, ...]
    seconds: tuple[str, ...] = ()
    """The second text of each pair; empty if there are no pairs."""
    params: tuple[str, ...]
    """The path of each text in the request."""
    prefix: str
    """Put before each text."""
    max_length: int
    truncate: int | None = None
    """Cut longer texts to so many tokens; None refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarTask:
    """Writes and compiles the grammar of a request's answers."""

    request: GenerationRequest
    """Without its messages."""
    tail: tuple[int, ...]
    """The last tokens of the prompt."""


InputTask: TypeAlias = PromptsTask | TextsTask | GrammarTask


class InputRunner(Protocol):
    """Runs tasks that take any time; implemented by `InputWorkers`."""

    async def prepare(
        self, lane: Lane, task: InputTask, *, size: int
    ) -> tuple[PreparedPrompt, ...]:
        """Return what a task asks for; `size` is that of its texts, in bytes.

        Raises:
            RefusedError: the model does not support it, or it takes too much time or memory.

        """
        ...
