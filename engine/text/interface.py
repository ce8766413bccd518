"""The interface of the text room: the tokenizer as other rooms use it. Imports no mlx."""

from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]  # one turn of a chat, in the form that templates take


class Detokenizer(Protocol):
    """Converts one sequence's tokens to text; never returns half a character."""

    def add_token(self, token: int) -> None:
        """Add one token."""
        ...

    def finalize(self) -> None:
        """Stop waiting for the rest of a character."""
        ...

    @property
    def last_segment(self) -> str:
        """The text since the last access."""
        ...
