"""The interface of the text room: the tokenizer as other rooms use it. Imports no mlx."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from engine.text.portable_tokenizer import PortableTokenizer
from engine.text.template_traits import TemplateTraits

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


class Codec(Protocol):
    """The tokenizer. It is read-only, so threads other than the worker may call it."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """True if the template can turn messages into a prompt."""
        ...

    @property
    def traits(self) -> TemplateTraits:
        """The model's markers, call syntax and template variables."""
        ...

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a text.

        Raises:
            TextTooLongError: it certainly has more than `max_tokens`, which its length shows; None accepts any text.

        """
        ...

    def encode_pair(
        self, text: str, second: str | None, *, max_tokens: int, truncate: int | None
    ) -> tuple[list[int], int]:
        """Return the tokens of a text, or of a pair that the model reads together, and where its second text begins.

        `truncate` cuts the end of the longest text so that there are at most so many tokens, special ones included.

        Raises:
            TextTooLongError: without `truncate`, it certainly has more than `max_tokens`.

        """
        ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        rewrite: Callable[[str], str] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the tokens of a conversation; `variables` (tools, ...) are passed to the template.

        `rewrite` changes the rendered text before it is tokenized.

        Raises:
            TextTooLongError: it certainly has more than `max_tokens`; None accepts any conversation.

        """
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer."""
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, which may be half a character."""
        ...

    def portable(self) -> PortableTokenizer:
        """Return what another process needs to make an equal codec."""
        ...
