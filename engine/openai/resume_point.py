"""Progress of an answer that another engine began, with which this one continues it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The progress of another engine with this request, before it was lost."""

    tokens: tuple[tuple[int, ...], ...]
    """Those of each choice."""
    finished: frozenset[int] = frozenset()
    """Indexes of choices whose end the client has; it is not sent again."""
    seed: int
    """That of the first choice; those of the others follow it."""
    prompt: str
    """Digest of the prompt's tokens there."""
    id: str
    created: int
    """Seconds since 1970."""
    cached_tokens: int
    """Prompt tokens that were cached there; the final usage repeats this number."""
    events: int = 0
    """The number of events that the client has, in streams whose events are numbered."""
