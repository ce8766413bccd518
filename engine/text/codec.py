"""The exact bytes of single tokens, which may be half a character. The tokenizer is given; no mlx here.

mlx-lm's tokenizer in our own words: messages and text to tokens, and tokens back to text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jinja2

from engine.errors import PromptRefusedError
from engine.ports import Detokenizer, Message
from engine.text import template_traits
from engine.text.template_traits import TemplateTraits

Piece: TypeAlias = Callable[[int], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_speller(tokenizer: Any) -> Piece:
    """Return what spells tokens of this tokenizer (transformers' own, or mlx-lm's wrapper)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:

        def decoded(token: int) -> bytes:
            text: str = tokenizer.decode([token])
            return text.encode()

        return decoded
    state = "" if backend.decoder is None else backend.decoder.__getstate__()
    kinds = _decoder_kinds(json.loads(state) if state else {})
    spell = _spell_byte_level if "ByteLevel" in kinds else _spell_sentencepiece
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}

    def piece(token: int) -> bytes:
        if token in added:
            content: str = added[token]
            return content.encode()
        name: str | None = backend.id_to_token(token)
        # The logits are longer than the vocabulary in most models.
        return b"" if name is None else spell(name)

    return piece


def _decoder_kinds(decoder: Any) -> set[str]:
    parts = decoder.get("decoders", [])
    return {decoder.get("type", "")} | {kind for part in parts for kind in _decoder_kinds(part)}


def _alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: those that can be seen as themselves, the others from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    shifted = {chr(256 + at): byte for at, byte in enumerate(others)}
    return {chr(byte): byte for byte in seen} | shifted


_ALPHABET = _alphabet()


def _spell_byte_level(name: str) -> bytes:
    return b"".join(bytes([_ALPHABET[one]]) if one in _ALPHABET else one.encode() for one in name)


def _spell_sentencepiece(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()


# What a template raises for messages it was not made for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
)


class TextCodec:
    """The tokenizer in our own words. `encode_*` run in other threads than the worker."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._piece = piece_speller(tokenizer)
        self._voice = template_traits.read_traits(tokenizer)

    @property
    def traits(self) -> TemplateTraits:
        """How the model speaks: markers, calls, the template's variables."""
        return self._voice

    @property
    def serialized(self) -> Callable[[], str] | None:
        """What writes the tokenizer as `tokenizer.json`; None if it is no fast one."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else backend.to_str

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens which end a text."""
        return tuple(sorted(self._tokenizer.eos_token_ids))

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(self._tokenizer.has_chat_template)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token in the tokenizer's own spelling, with its number."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    @property
    def size(self) -> int:
        """The number of tokens known."""
        return len(self._tokenizer)

    def encode_text(self, text: str) -> list[int]:
        """Return a text's tokens, with the ones the model wants at a start."""
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the tokens of messages, up to where the assistant speaks; `variables` are the template's.

        Raises:
            PromptRefusedError: the template does not allow these messages.

        """
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, **variables
                )
            )
        except _TEMPLATE_ERRORS as error:
            raise PromptRefusedError(str(error)) from error

    def template_complaint(self) -> str:
        """Say why the chat template is none that could be rendered, whatever the messages; "" if it is, or is absent."""
        if not self.has_chat_template:
            return ""
        try:
            self.encode_chat([{"role": "user", "content": "?"}])
        except PromptRefusedError as error:
            cause = error.__cause__
            return str(error) if isinstance(cause, jinja2.TemplateSyntaxError) else ""
        return ""

    def detokenizer(self) -> Detokenizer:
        """Return a fresh detokenizer."""
        detokenizer: Detokenizer = self._tokenizer.detokenizer
        return detokenizer

    def piece(self, token: int) -> bytes:
        """Return what one token alone spells, which may be half a character."""
        return self._piece(token)
