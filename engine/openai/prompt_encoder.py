"""Encodes the prompts of requests: from messages and texts to tokens. Runs in the input workers.

A chat template and a tokenizer come with a model's files, and may take any time for some texts: only a process of its
own can be ended.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Final, assert_never

from engine.errors import PromptRefusedError, RefusedError, TextTooLongError
from engine.grammar.interface import GrammarCompiler
from engine.openai import messages, output_format, prompts
from engine.openai.input_tasks import (
    GrammarTask,
    InputTask,
    PreparedPrompt,
    PromptsTask,
    TextsTask,
)
from engine.openai.output_format import ChatEncoder
from engine.openai.request_body import Conversation, GenerationRequest, TextPrompts
from engine.text.codec import TextCodec
from engine.text.interface import Message
from engine.vision import media_reader
from engine.vision.media_reader import Medium
from schemas.wire import errors

_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_MOST_SYSTEMS: Final = 64
_system_tokens: dict[bytes, int] = {}
"""The number of tokens of the last systems messages and tools, by their digest: to count them takes as long as a prompt."""


def run(
    task: InputTask, codec: TextCodec, grammars: GrammarCompiler | None
) -> tuple[PreparedPrompt, ...]:
    """Return what a task asks for.

    Raises:
        RefusedError: the model does not support it.

    """
    match task:
        case PromptsTask(request=request, context_length=context_length):
            media, rewrite = _read_media(task), None
            images = tuple(image for medium in media for image in medium.inputs)
            if task.image_rules is not None and media:
                rewrite = partial(media_reader.write_media, media=media, rules=task.image_rules)
            found = encode_prompts(request, codec, context_length=context_length, rewrite=rewrite)
            if task.image_rules is not None and media:
                media_reader.check_places(found[0], images, task.image_rules)
            _check_context(request, found, context_length)
            system = _count_system_tokens(request, codec, found[0]) if task.counts_system else 0
            return tuple(
                PreparedPrompt(tokens=tuple(tokens), images=images, system_tokens=system)
                for tokens in found
            )
        case TextsTask():
            return tuple(_encode_texts(task, codec))
        case GrammarTask(request=request, tail=tail):
            grammar = output_format.write_grammar(request, tail, codec, grammars)
            return (PreparedPrompt(grammar=grammar),)
        case _:
            assert_never(task)


def _read_media(task: PromptsTask) -> tuple[Medium, ...]:
    """Return the images, videos and recordings of a chat. Raises RefusedError."""
    prompt = task.request.prompt
    if task.image_rules is None or not isinstance(prompt, Conversation):
        return ()
    return media_reader.read_media(media_reader.media_parts(prompt.messages), task.image_rules)


def _check_context(
    request: GenerationRequest, found: Sequence[Sequence[int]], context_length: int | None
) -> None:
    """Refuse prompts that leave no room for an answer here, before all their tokens are sent on."""
    longest = max(map(len, found), default=0)
    if context_length is not None and longest >= context_length:
        param = "messages" if request.is_chat else "prompt"
        raise prompts.context_exceeded(param, context_length, longest)


def _encode_texts(task: TextsTask, codec: TextCodec) -> Iterator[PreparedPrompt]:
    seconds: Sequence[str | None] = task.seconds or [None] * len(task.texts)
    for text, second, param in zip(task.texts, seconds, task.params, strict=True):
        try:
            tokens, second_start = codec.encode_pair(
                task.prefix + text, second, max_tokens=task.max_length, truncate=task.truncate
            )
        except TextTooLongError as error:
            least = f"at least {error.min_tokens}"
            raise prompts.context_exceeded(param, task.max_length, least) from error
        yield PreparedPrompt(tokens=tuple(tokens), second_start=second_start)


def encode_prompts(
    request: GenerationRequest,
    codec: TextCodec,
    *,
    context_length: int | None = None,
    rewrite: Callable[[str], str] | None = None,
) -> list[list[int]]:
    """Return the tokens of each prompt of a request; `rewrite` changes a rendered conversation.

    A text that is certainly longer than the context is refused before it is tokenized; None accepts any text.

    Raises:
        RefusedError: the model has no chat template, the template refuses the messages, or a text is too long.

    """
    param = "messages" if request.is_chat else "prompt"
    with refusing_long_texts(param, context_length) as max_tokens:
        match request.prompt:
            case TextPrompts(contents=contents, infill=infill):
                form = codec.traits.infill
                if infill is not None and form is not None:
                    contents = tuple(
                        form.render(content, infill.suffix, infill.files)
                        for content in contents
                        if isinstance(content, str)
                    )
                return [_encode_content(content, codec, max_tokens) for content in contents]
            case Conversation(messages=turns):
                encoder = ChatEncoder(request, codec, max_tokens=max_tokens, rewrite=rewrite)
                return [_encode_chat(media_reader.without_urls(turns), encoder)]
            case _:
                assert_never(request.prompt)


@contextmanager
def refusing_long_texts(param: str, context_length: int | None) -> Iterator[int | None]:
    """Yield the most tokens that a prompt may have; refuse a text that certainly has more.

    Raises:
        RefusedError: the block raised TextTooLongError.

    """
    if context_length is None:
        yield None
        return
    try:
        yield context_length - 1  # an answer has at least one
    except TextTooLongError as error:
        raise prompts.context_exceeded(
            param, context_length, f"at least {error.min_tokens}"
        ) from error


def _encode_content(
    content: str | tuple[int, ...], codec: TextCodec, max_tokens: int | None
) -> list[int]:
    if isinstance(content, str):
        return codec.encode_text(content, max_tokens=max_tokens)
    return list(content)


def _encode_chat(turns: Sequence[Message], encoder: ChatEncoder) -> list[int]:
    if not encoder.has_chat_template:
        raise errors.invalid(
            "This model has no chat template; use /v1/completions.", param="messages"
        )
    try:
        tokens = encoder.encode_chat(turns)
        named = {turn["role"]: at for at, turn in enumerate(turns) if "name" in turn}
        named.pop("tool", None)
        # One turn of each role is enough: a template that writes one user's name writes all.
        for role, at in named.items():
            if not _writes_name(turns, at, tokens, encoder):
                turns = messages.with_spoken_names(turns, role)
                tokens = encoder.encode_chat(turns)
    except PromptRefusedError as error:
        message = f"The model's chat template refuses these messages: {error}"
        raise errors.invalid(message, param="messages") from error
    return tokens


def _count_system_tokens(
    request: GenerationRequest, codec: TextCodec, tokens: Sequence[int]
) -> int:
    """Return how many tokens come before the text of a chat's first user message; 0 if the template hides it.

    They are those that the prompt shares with another one of the same system message and tools.
    """
    if not isinstance(request.prompt, Conversation):
        return 0
    system = list(takewhile(lambda turn: turn["role"] in _SYSTEM_ROLES, request.prompt.messages))
    toolbox, form = request.toolbox, request.format
    parts = (system, toolbox, form, request.effort, request.template_variables)
    key = hashlib.blake2b(pickle.dumps(parts), digest_size=16).digest()
    count = _system_tokens.pop(key, None)
    if count is None:
        prompt = Conversation(messages=(*system, {"role": "user", "content": "a"}))
        try:
            other = ChatEncoder(replace(request, prompt=prompt), codec).encode_chat(prompt.messages)
        except (PromptRefusedError, RefusedError):
            other = []
        pairs = enumerate(zip(tokens, other, strict=False))
        count = next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(other)))
    _system_tokens[key] = count
    if len(_system_tokens) > _MOST_SYSTEMS:
        del _system_tokens[next(iter(_system_tokens))]
    return count


def _writes_name(
    turns: Sequence[Message], index: int, tokens: list[int], encoder: ChatEncoder
) -> bool:
    """Return whether the template writes the name of a turn into the prompt."""
    without = {key: value for key, value in turns[index].items() if key != "name"}
    return encoder.encode_chat([*turns[:index], without, *turns[index + 1 :]]) != tokens
