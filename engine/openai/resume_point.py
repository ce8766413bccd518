"""Progress of an answer that another engine began, with which this one continues it."""

from typing import Annotated, TypeAlias

from pydantic import ConfigDict, Field

from engine.openai.parameters import StrictModel
from engine.openai.prompts import Tokens

Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]


class ResumePoint(StrictModel):
    """The field `fleet`: the sum of the resume records of an engine that was lost."""

    model_config = ConfigDict(frozen=True)

    tokens: Tokens | None = None
    """Those of the only choice."""
    choices: Annotated[list[Tokens], Field(min_length=2, fail_fast=True)] | None = None
    """Those of each choice, if there are several."""
    finished: list[int] = Field(default=[], max_length=1024)
    """Indexes of choices whose end the client has; it is not sent again."""
    seed: Seed
    """That of the first choice; those of the others follow it."""
    prompt: Annotated[str, Field(max_length=100)]
    """Digest of the prompt's tokens there."""
    id: Annotated[str, Field(min_length=1, max_length=200)]
    created: Count
    """Seconds since 1970."""
    cached_tokens: Count = 0
    """Prompt tokens that were cached there; the final usage repeats this number."""
    events: Count = 0
    """The number of events that the client has, in streams whose events are numbered."""

    @property
    def emitted(self) -> list[list[int]]:
        """The tokens of each choice."""
        return [self.tokens] if self.tokens is not None else self.choices or []
