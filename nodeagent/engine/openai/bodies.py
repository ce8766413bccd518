"""From the bytes of a request to a checked value: OpenAI's shapes, this engine's limits.

Validation that needs the tokenizer is in prompts.py. Nothing here waits or knows of HTTP.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nodeagent.engine import errors
from nodeagent.engine.jobs import Sampling
from nodeagent.engine.openai import formats, messages, parameters, sampling, tools
from nodeagent.engine.openai.sampling import SamplingBody
from nodeagent.engine.openai.tools import Tools
from nodeagent.engine.ports import Message

_B = TypeVar("_B", bound=BaseModel)
Stop: TypeAlias = Annotated[str, Field(min_length=1)]
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Token: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
SessionId: TypeAlias = Annotated[str, Field(max_length=512)]
_STRICT = ConfigDict(strict=True, extra="forbid")


class _StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Body(SamplingBody):
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Seed | None = None
    stop: Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    include_performance: bool | None = None
    fit_max_tokens: bool | None = None
    user: str | None = None
    session_id: SessionId | None = None

    @field_validator("stop", mode="before", json_schema_input_type=Stop | list[Stop] | None)
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class ChatBody(_Body):
    """What `/v1/chat/completions` takes."""

    messages: Annotated[list[messages.AnyMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    response_format: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(_Body):
    """What `/v1/completions` takes."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class _Fleet(BaseModel):
    """What a gateway sends to have an answer continued: the sums of its marks."""

    model_config = _STRICT

    tokens: list[Token]
    seed: Seed
    prompt: Annotated[str, Field(max_length=100)]
    id: Annotated[str, Field(min_length=1, max_length=200)]
    created: Annotated[int, Field(ge=0, lt=2**53)]
    cached_tokens: Annotated[int, Field(ge=0, lt=2**53)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that the model's chat template writes."""

    messages: tuple[Message, ...]
    """As templates take them (messages.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Prompts as they are, or as the tokens they are made of."""

    contents: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How far another process came with this request before it was lost."""

    tokens: tuple[int, ...]
    seed: int
    prompt: str
    """The digest of the prompt's tokens there."""
    id: str
    created: int
    """Seconds since 1970."""
    cached_tokens: int
    """How many of the prompt's were cached there: what the client is told at the end, wherever that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one client wants, in range and complete but for what depends on the prompt's tokens."""

    model: str
    prompt: Conversation | Texts
    max_tokens: int | None
    sampling: Sampling
    """Its seed is not set yet."""
    seed: int | None
    stops: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    n: int = 1
    """Choices a prompt."""
    top_logprobs: int | None = None
    """How many alternatives to tell of each token; None: no likelihoods at all."""
    is_echoed: bool = False
    has_performance: bool = False
    is_fitted: bool = False
    """Whether `max_tokens` is the most there may be, not what there must be room for."""
    is_resumable: bool = False
    """Whether marks tell what another process needs to continue: for one choice, as a stream."""
    resumed: Resumed | None = None
    format: formats.Format | None = None
    """What the text has to match."""
    toolbox: tools.Toolbox | None = None
    effort: str | None = None
    """How much to think."""

    @property
    def is_chat(self) -> bool:
        """Whether it came to the chat endpoint."""
        return isinstance(self.prompt, Conversation)

    @property
    def size(self) -> int:
        """The number of choices."""
        prompts = 1 if isinstance(self.prompt, Conversation) else len(self.prompt.contents)
        return prompts * self.n


def parse_chat(raw: bytes, *, is_resumable: bool = False) -> Request:
    """Read the body of a chat request; only with `is_resumable` may it have the field `fleet`.

    Raises:
        RefusedError: it asks for something that is wrong or that the engine does not do.

    """
    fields = read_object(raw)
    fleet = _take_fleet(fields) if is_resumable else None
    parameters.chat().check(fields)
    messages.tidy(fields.get("messages"))
    body = validated(ChatBody, fields)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise errors.invalid(
            "'max_tokens' and 'max_completion_tokens' cannot both be set.", param="max_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise errors.invalid(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )
    request = Request(
        prompt=Conversation(messages=messages.for_template(body.messages)),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        format=_format(body.response_format),
        toolbox=tools.read(
            body.tools, _choice(body.tool_choice), is_parallel=body.parallel_tool_calls
        ),
        effort=body.reasoning_effort,
        **_common(body),
    )
    return request if not is_resumable else _resumable(request, fleet)


def parse_completion(raw: bytes, *, is_resumable: bool = False) -> Request:
    """Read the body of a completion request; only with `is_resumable` may it have the field `fleet`.

    Raises:
        RefusedError: it asks for something that is wrong or that the engine does not do.

    """
    fields = read_object(raw)
    fleet = _take_fleet(fields) if is_resumable else None
    parameters.completion().check(fields)
    body = validated(CompletionBody, fields)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise errors.invalid(
            "'best_of' must equal 'n': this engine returns all that it generates.", param="best_of"
        )
    if body.echo and body.logprobs is not None:
        raise errors.invalid(
            "'echo' cannot be combined with 'logprobs': the likelihoods of a prompt are not kept.",
            param="echo",
        )
    request = Request(
        prompt=Texts(contents=_contents(body.prompt)),
        max_tokens=body.max_tokens,
        top_logprobs=body.logprobs,
        is_echoed=bool(body.echo),
        **_common(body),
    )
    return request if not is_resumable else _resumable(request, fleet)


def _format(given: dict[str, Any] | None) -> formats.Format | None:
    if given is None:
        return None
    return formats.read(validated(formats.kind(given), given, at="response_format"))


def _choice(given: str | dict[str, Any] | None) -> tools.Choice | None:
    if given is None or isinstance(given, str):
        return tools.mode(given)
    return validated(tools.choice_kind(given), given, at="tool_choice")


def _common(body: _Body) -> dict[str, Any]:
    """Return the fields of a Request which both endpoints have."""
    if body.stream_options is not None and not body.stream:
        raise errors.invalid(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return {
        "model": body.model,
        "sampling": sampling.read(body),
        "seed": body.seed,
        "stops": tuple(body.stop or ()),
        "n": body.n or 1,
        "is_streamed": bool(body.stream),
        "has_usage": bool(body.stream_options and body.stream_options.include_usage),
        "has_performance": bool(body.include_performance),
        "is_fitted": bool(body.fit_max_tokens),
    }


def _take_fleet(fields: dict[str, Any]) -> Resumed | None:
    given = fields.pop("fleet", None)
    if given is None:
        return None
    fleet = validated(_Fleet, given, at="fleet")
    return Resumed(
        tokens=tuple(fleet.tokens),
        seed=fleet.seed,
        prompt=fleet.prompt,
        id=fleet.id,
        created=fleet.created,
        cached_tokens=fleet.cached_tokens,
    )


def _resumable(request: Request, resumed: Resumed | None) -> Request:
    if resumed is not None and not request.is_streamed:
        raise errors.invalid("'fleet' continues streams only.", param="fleet")
    if resumed is not None and request.size != 1:
        name = "n" if request.n > 1 else "prompt"
        raise errors.invalid(f"'fleet' continues one choice; '{name}' asks for more.", param=name)
    is_resumable = request.is_streamed and request.size == 1
    return dataclasses.replace(request, is_resumable=is_resumable, resumed=resumed)


def read_object(raw: bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        RefusedError: it is none.

    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise errors.invalid(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.invalid("The body must be a JSON object.")
    return fields


def validated(kind: type[_B], fields: Any, *, at: str = "") -> _B:
    """Return parsed JSON as a model; `at` is where in the body it lies.

    Raises:
        RefusedError: a value is wrong; names it.

    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        # Of a union's complaints, the deepest is about the member that nearly fitted.
        found = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
        param = _path([at, *found["loc"]] if at else found["loc"])
        raise errors.invalid(f"Invalid '{param}': {found['msg']}.", param=param) from error


def _path(location: Sequence[str | int]) -> str:
    """Write a location as OpenAI does, `messages[0].content`, without pydantic's union members."""
    text = ""
    before: str | int = ""
    for part in location:
        # A role after an index tells which kind of message it is; it is no field.
        is_kind = part in ("str", "int") or (isinstance(before, int) and part in messages.ROLES)
        before = part
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and not is_kind:
            text += f".{part}" if text else part
    return text or "body"


def _contents(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts; a list of numbers is one prompt, and any other list is several."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise errors.invalid("'prompt' must not be empty.", param="prompt")
    numbers = tuple(one for one in prompt if isinstance(one, int))
    if numbers:
        return (numbers,)
    return tuple(
        one if isinstance(one, str) else tuple(one) for one in prompt if not isinstance(one, int)
    )
