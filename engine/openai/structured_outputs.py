"""Parsing of vLLM's structured outputs: `structured_outputs` and the older `guided_*` parameters. Pure.

Source: vLLM, "Structured Outputs". Text that must match is not put into the prompt; `response_format` does that.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import orjson
from pydantic import BaseModel, Field

from engine.errors import GrammarError
from engine.grammar import client_grammar, json_schema, lark
from engine.openai.output_options import RequiredText
from engine.openai.parameters import StrictModel
from schemas.wire import errors

Json: TypeAlias = Any
JsonSchema: TypeAlias = dict[str, Json] | str
_MAX_PATTERN = 2_000
_MAX_CHOICES, _MAX_CHOICE_CHARACTERS = 1_000, 32_768
Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=_MAX_PATTERN)]
ChoiceText: TypeAlias = Annotated[str, Field(min_length=1)]
Choices: TypeAlias = Annotated[
    list[ChoiceText], Field(min_length=1, max_length=_MAX_CHOICES, fail_fast=True)
]
Grammar: TypeAlias = Annotated[str, Field(min_length=1, max_length=client_grammar.MAX_CHARACTERS)]


class StructuredOutputs(StrictModel):
    """The text that an answer must be; one of the fields."""

    json_: JsonSchema | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class GuidedBody(BaseModel):
    """The parameters of a request body."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None


def read(body: GuidedBody) -> RequiredText | None:
    """Return the text that an answer must match; None if any text is allowed.

    Raises:
        RefusedError: there are several forms, or one cannot be enforced; names the parameter.

    """
    given = _given(body)
    if not given:
        return None
    if len(given) > 1:
        names = "', '".join(given)
        message = f"An answer has one form; '{names}' ask for several."
        raise errors.invalid(message, param=list(given)[1])
    ((param, (kind, value)),) = given.items()
    try:
        return _required(kind, value, param)
    except GrammarError as error:
        raise errors.invalid(f"Invalid '{param}': {error}", param=param) from error


def _given(body: GuidedBody) -> dict[str, tuple[str, Json]]:
    """Return the kind and the value of each form, by the path of its parameter."""
    given = {
        f"guided_{kind}": (kind, value)
        for kind in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{kind}")) is not None
    }
    if body.structured_outputs is None:
        return given
    # `json_object: false` asks for nothing.
    inner = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    return given | {
        f"structured_outputs.{kind}": (kind, value)
        for kind, value in inner.items()
        if value is not False
    }


def _required(kind: str, value: Json, param: str) -> RequiredText:
    match kind:
        case "json_object":
            return RequiredText.from_schema({"type": "object"}, param=param)
        case "json":
            return RequiredText.from_schema(_schema(value), param=param)
        case "regex":
            return RequiredText(value=lark.pattern_value(value), param=param)
        case "choice":
            _check_choices(value)
            return RequiredText(value=lark.choice_value(value), param=param)
        case _:
            return RequiredText(value=lark.client_value(client_grammar.to_lark(value)), param=param)


def _schema(value: JsonSchema) -> Json:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise GrammarError(f"It is not valid JSON: {error}.") from error
    json_schema.check_nesting(value)
    return json_schema.normalize_schema(value)


def _check_choices(texts: Sequence[str]) -> None:
    characters = sum(len(text) for text in texts)
    if characters > _MAX_CHOICE_CHARACTERS:
        raise GrammarError(
            f"Its texts have {characters} characters together; they may have {_MAX_CHOICE_CHARACTERS}."
        )
