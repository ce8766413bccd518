"""Prompts of completions, and inputs of embeddings: their forms and the limits that hold before tokenizing. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Discriminator, Field, Tag

from engine.openai import parameters
from engine.openai.parameters import LenientModel
from engine.text.infill import InfillFile
from schemas.wire import errors

# Lists of prompts: more choices than this are refused later by the number of slots.
_MAX_PROMPTS = 1024
# Files beside the one that is filled in: llama.vscode sends 16 chunks.
_MAX_FILES = 256
Token: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
# A list of a million wrong values would become a million errors.
Tokens: TypeAlias = Annotated[list[Token], Field(fail_fast=True)]


def _prompt_kind(value: object) -> str:
    """Return the tag of the one form that the first part of a prompt fits; pydantic would try all forms."""
    if isinstance(value, str):
        return "a text"
    first = value[0] if isinstance(value, list | tuple) and value else ""
    if isinstance(first, str):
        return "some texts"
    return "some lists" if isinstance(first, list | tuple) else "some tokens"


Prompt: TypeAlias = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("some texts")]
    | Annotated[Tokens, Tag("some tokens")]
    | Annotated[list[Tokens], Field(fail_fast=True), Tag("some lists")],
    Discriminator(_prompt_kind),
]
"""Prompts of a completion, or inputs of embeddings: a text, some texts, tokens, or some lists of tokens."""


def check_token_lists(prompt: object, context_length: int | None) -> None:
    """Refuse too many prompts, and a list of tokens that is longer than the context.

    Raises:
        RefusedError: there is one.

    """
    if not isinstance(prompt, list) or not prompt:
        return
    if isinstance(prompt[0], int):
        check_tokens(prompt, context_length, "prompt")
        return
    parameters.check_count(prompt, _MAX_PROMPTS, "prompt")
    for one in prompt:
        check_tokens(one, context_length, "prompt")


def check_tokens(tokens: object, context_length: int | None, param: str) -> None:
    if context_length is not None and isinstance(tokens, list) and len(tokens) > context_length:
        raise context_exceeded(param, context_length, len(tokens))


def context_exceeded(param: str, context_length: int, tokens: int | str) -> errors.RefusedError:
    """Return the refusal of a prompt of that many tokens, in OpenAI's words, which clients search for."""
    message = (
        f"This model's maximum context length is {context_length} tokens. However, your {param} "
        f"resulted in {tokens} tokens. Please reduce the length of the {param}."
    )
    return errors.invalid(message, param=param, code="context_length_exceeded")


def prompt_contents(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts; a list of numbers is one prompt, any other list is several."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise errors.invalid("'prompt' must not be empty.", param="prompt")
    numbers = tuple(part for part in prompt if isinstance(part, int))
    if numbers:
        return (numbers,)
    return tuple(
        part if isinstance(part, str) else tuple(part)
        for part in prompt
        if not isinstance(part, int)
    )


class ExtraFile(LenientModel):
    """llama.cpp's form of another file of the project."""

    text: str
    filename: str = "file"


ExtraFiles: TypeAlias = Annotated[list[ExtraFile], Field(max_length=_MAX_FILES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """Text that surrounds a gap, besides the prompt."""

    suffix: str
    """Stands behind the gap."""
    files: tuple[InfillFile, ...] = ()


def read_infill(
    prompt: object, suffix: str | None, extra: Sequence[ExtraFile] | None, *, is_echoed: bool
) -> Infill | None:
    """Return the text around a gap; None if the answer continues the prompt. An empty suffix alone asks for nothing.

    Raises:
        RefusedError: the prompt is not text, or would be repeated.

    """
    if not suffix and extra is None:
        return None
    if is_echoed:
        raise errors.invalid(
            "'echo' cannot be combined with 'suffix': the answer stands between the two texts.",
            param="echo",
        )
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts):
        raise errors.invalid(
            "'suffix' needs a 'prompt' that is text, not tokens; send the text, or put the model's own "
            "fill-in-the-middle tokens into 'prompt' and leave 'suffix' out.",
            param="prompt",
        )
    files = tuple(InfillFile(file.filename, file.text) for file in extra or ())
    return Infill(suffix=suffix or "", files=files)
