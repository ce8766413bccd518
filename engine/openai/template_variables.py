"""Variables of chat templates in request bodies, as vLLM, SGLang, llama.cpp and mlx-lm take them. Pure."""

from typing import Annotated, Any, TypeAlias

import orjson
from pydantic import Field

from schemas.wire import errors

_MAX_VARIABLES = 32
_MAX_BYTES = 16 << 10
# Parameters of the function that renders templates (transformers' apply_chat_template), and what templates get from it.
_RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "max_tokens",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

TemplateVariables: TypeAlias = Annotated[dict[str, Any], Field(max_length=_MAX_VARIABLES)]
"""Variables of the chat template."""


def read_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables for the chat template.

    Raises:
        RefusedError: one would replace what other parameters say, or they are too long.

    """
    for name in sorted((variables or {}).keys() & _RESERVED_VARIABLES):
        raise errors.invalid(
            f"'{name}' is not for 'chat_template_kwargs': the engine sets it from the other parameters.",
            param=f"chat_template_kwargs.{name}",
        )
    length = len(orjson.dumps(variables))
    if length > _MAX_BYTES:
        raise errors.invalid(
            f"'chat_template_kwargs' has {length} bytes; it may have {_MAX_BYTES}.",
            param="chat_template_kwargs",
        )
    return variables or {}
