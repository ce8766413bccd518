"""Adapter of mlx-lm's tokenizer: messages and text to tokens, tokens to text, and single tokens to bytes.

The tokenizer is passed in; nothing here imports mlx.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from engine import errors
from engine.errors import PromptRefusedError, TextTooLongError
from engine.text import template_check, template_traits
from engine.text.interface import Detokenizer, Message
from engine.text.portable_tokenizer import PortableTokenizer
from engine.text.template_traits import TemplateTraits

PieceSpeller: TypeAlias = Callable[[int], bytes]

# Unicode's composition (NFC) makes a third of some texts: nine bytes of Korean letters become a syllable of three.
_NORMALIZED_SHRINK = 3
# The longest context is some 64 MiB of text.
_MAX_RENDERED_CHARACTERS = 128 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_speller(tokenizer: Any) -> PieceSpeller:
    """Return a function from a token id to the bytes of the token, which may be half a character.

    `tokenizer` is transformers' own or mlx-lm's wrapper.
    """
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
        # Most models have more logits than the vocabulary has tokens.
        return b"" if name is None else spell(name)

    return piece


def longest_token(tokenizer: Any) -> int:
    """Return the most bytes of text that one token stands for; 0 if a token may stand for any number.

    Only a tokenizer that keeps every byte has such a number: others drop blanks, or read a run of unknown characters as
    one token.
    """
    backend = tokenizer.backend_tokenizer
    state = "" if backend.decoder is None else backend.decoder.__getstate__()
    if not _decoder_kinds(json.loads(state) if state else {}) & {"ByteLevel", "ByteFallback"}:
        return 0
    spell = piece_speller(tokenizer)
    longest = max(len(spell(token)) for token in range(len(tokenizer)))
    return longest if backend.normalizer is None else longest * _NORMALIZED_SHRINK


def _decoder_kinds(decoder: Any) -> set[str]:
    parts = decoder.get("decoders", [])
    return {decoder.get("type", "")} | {kind for part in parts for kind in _decoder_kinds(part)}


def _alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + at): byte for at, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_ALPHABET = _alphabet()


def _spell_byte_level(name: str) -> bytes:
    return b"".join(
        bytes([_ALPHABET[character]]) if character in _ALPHABET else character.encode()
        for character in name
    )


def _spell_sentencepiece(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()


@contextmanager
def _refusing_unreadable() -> Iterator[None]:
    """Refuse a text on which the tokenizer fails: its patterns and tables come with the model's files."""
    try:
        yield
    except BaseException as error:
        # The tokenizers library raises bare Exception, or panics, as for a pattern that backtracks without an end.
        if not isinstance(error, Exception) and not errors.is_panic(error):
            raise
        message = f"The model's tokenizer cannot read this text: {errors.summarize(error)}"
        raise errors.invalid(message, code="unreadable_text") from error


class TextCodec:
    """The tokenizer. It is read-only, so threads other than the worker may call it.

    `encode_*` run in the input workers, not in the serving process.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer of mlx-lm, or a portable one."""
        self._tokenizer = tokenizer
        self._piece = piece_speller(tokenizer)
        self._is_fast = getattr(tokenizer, "backend_tokenizer", None) is not None
        if isinstance(tokenizer, PortableTokenizer):
            self._traits, self._token_bytes = tokenizer.traits, tokenizer.token_bytes
        else:
            self._traits = template_traits.read_traits(tokenizer)
            self._token_bytes = longest_token(tokenizer) if self._is_fast else 0

    def portable(self) -> PortableTokenizer:
        """Return what another process needs to make an equal codec."""
        wrapper = self._tokenizer
        return PortableTokenizer(
            tokenizer=self._plain,
            traits=self._traits,
            token_bytes=self._token_bytes,
            eos_token_ids=self.eos_ids,
            has_chat_template=self.has_chat_template,
            has_thinking=bool(wrapper.has_thinking),
            thinking_switch=getattr(wrapper, "_thinking_kwarg", "enable_thinking"),
            renderer=getattr(wrapper, "_chat_template", None),
        )

    @property
    def _plain(self) -> Any:
        """Transformers' own tokenizer."""
        wrapper = self._tokenizer
        if isinstance(wrapper, PortableTokenizer):
            return wrapper.tokenizer
        return getattr(wrapper, "_tokenizer", wrapper)

    @property
    def traits(self) -> TemplateTraits:
        """The markers, the tool call format and the variables of the chat template."""
        return self._traits

    @property
    def serialized(self) -> Callable[[], str] | None:
        """A function that returns the tokenizer as `tokenizer.json`; None if it is not a fast tokenizer."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else backend.to_str

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, in ascending order."""
        return tuple(sorted(self._tokenizer.eos_token_ids))

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return bool(self._tokenizer.has_chat_template)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token ids by the tokenizer's own spelling."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    @property
    def size(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self._tokenizer)

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a text, with the special tokens that begin a text.

        Raises:
            TextTooLongError: it certainly has more than `max_tokens`.
            RefusedError: the tokenizer fails on it.

        """
        self._check_length(text, max_tokens)
        with _refusing_unreadable():
            return list(self._tokenizer.encode(text))

    def encode_pair(
        self, text: str, second: str | None, *, max_tokens: int, truncate: int | None
    ) -> tuple[list[int], int]:
        """Return the tokens of a text or a pair with the special ones, and the index of the second text's first token.

        The index is 0 without a second text, and where the tokenizer gives both the same type. `truncate` cuts the end
        of the longest text so that at most so many tokens are left.

        Raises:
            TextTooLongError: without `truncate`, it certainly has more than `max_tokens`.
            RefusedError: the tokenizer fails on it.

        """
        if truncate is None:
            self._check_length(text + (second or ""), max_tokens)
        limit = {} if truncate is None else {"truncation": True, "max_length": truncate}
        with _refusing_unreadable():
            encoded = self._plain(text, second, verbose=False, **limit)
        types: list[int] = encoded.get("token_type_ids") or []
        return list(encoded["input_ids"]), types.index(
            1
        ) if second is not None and 1 in types else 0

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        rewrite: Callable[[str], str] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the tokens of messages up to the start of the answer; `variables` are passed to the template.

        `rewrite` changes the rendered text before it is tokenized.

        Raises:
            PromptRefusedError: the template does not support these messages.
            TextTooLongError: the rendered text certainly has more than `max_tokens`.
            RefusedError: the tokenizer fails on the rendered text.

        """
        if not self._is_fast and rewrite is None:
            return list(self._render(messages, variables, tokenize=True))
        text = self._render(messages, variables, tokenize=False)
        if rewrite is not None:
            text = rewrite(text)
        self._check_length(text, max_tokens)
        with _refusing_unreadable():
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, tokenize: bool
    ) -> Any:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=tokenize,
                **{"add_generation_prompt": True, **variables},
            )
        except template_check.REFUSALS as error:
            raise PromptRefusedError(str(error)) from error
        except MemoryError as error:
            raise PromptRefusedError("it takes too much memory for them") from error
        if len(rendered) > _MAX_RENDERED_CHARACTERS:
            raise PromptRefusedError(f"it writes {len(rendered)} characters for them")
        return rendered

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        """Refuse a text with more bytes than `max_tokens` of the longest token have."""
        if max_tokens is None or not self._token_bytes or len(text) <= max_tokens:
            return
        min_tokens = len(text.encode(errors="replace")) // self._token_bytes
        if min_tokens > max_tokens:
            raise TextTooLongError(min_tokens)

    def template_complaint(self) -> str:
        """Return why the chat template cannot be used; "" if it can, or if there is none. Takes a child process."""
        template = getattr(self._tokenizer, "chat_template", None)
        templates = list(template.values()) if isinstance(template, dict) else [template]
        sources = [one for one in templates if isinstance(one, str)]
        if not sources:
            return ""
        tokens = getattr(self._tokenizer, "special_tokens_map", {})
        texts = {name: token for name, token in tokens.items() if isinstance(token, str)}
        return template_check.find_complaint(sources, texts)

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer."""
        detokenizer: Detokenizer = self._tokenizer.detokenizer
        return detokenizer

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, which may be half a character."""
        return self._piece(token)
