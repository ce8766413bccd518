"""Bodies of chat and completion requests: from bytes to a checked value, in OpenAI's form and within its limits.

Checks that need the tokenizer are in input_processor.py. Nothing here awaits or knows HTTP.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError, field_validator

from engine.jobs import SamplingParams
from engine.openai import (
    messages,
    output_options,
    parameters,
    prompts,
    structured_outputs,
    template_variables,
)
from engine.openai.output_options import Tools
from engine.openai.parameters import EndpointParameters, LenientModel, StrictModel
from engine.openai.prompts import Infill, Prompt
from engine.openai.resume_point import ResumePoint, Seed
from engine.openai.structured_outputs import GuidedBody
from engine.openai.template_variables import TemplateVariables
from engine.text.interface import Message
from schemas.sampling import Sampling
from schemas.wire import errors, nulls, streams

_B = TypeVar("_B", bound=BaseModel)
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Field(gt=0, le=2)]
Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Stop: TypeAlias = Annotated[str, Field(min_length=1)]
# OpenAI has 4, other servers have no limit; each costs a comparison a token.
_MAX_STOPS = 64
# Tokens that no answer reaches.
_NEVER = 2**31
SessionId: TypeAlias = Annotated[str, Field(max_length=512)]
CacheSalt: TypeAlias = Annotated[str, Field(min_length=1, max_length=512)]
"""vLLM's field: prompts with different values share no cached prefixes."""

_NO_SAMPLING = Sampling()
# Logits divided by a lower temperature overflow float32; the sampled token is the most probable one anyway.
_MIN_TEMPERATURE = 1e-4


class SamplingBody(LenientModel):
    """Sampling parameters. Strict, so that "0.5" is no number; unknown names were refused before."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None


class _StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _GenerationBody(SamplingBody, GuidedBody):
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Seed | None = None
    stop: Annotated[list[Stop], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    include_performance: bool | None = None
    fit_max_tokens: bool | None = None
    user: str | None = None
    session_id: SessionId | None = None
    cache_salt: CacheSalt | None = None
    cache_prompt: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _as_list(cls, value: object) -> object:
        # An empty field of a form: no stop word.
        texts = [value] if isinstance(value, str) else value
        return [text for text in texts if text != ""] if isinstance(texts, list) else texts


class ChatBody(_GenerationBody):
    """Body of `/v1/chat/completions`."""

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
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(_GenerationBody):
    """Body of `/v1/completions`."""

    prompt: Prompt
    best_of: int | None = None
    # With 0, the answer is the echo of the prompt.
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: str | None = None
    input_extra: prompts.ExtraFiles | None = None


CHAT_PARAMETERS: Final = EndpointParameters(
    model=ChatBody, limited=parameters.LIMITED_CHAT, takes_others=True
)
COMPLETION_PARAMETERS: Final = EndpointParameters(model=CompletionBody, takes_others=True)


class ConversationEnd(Enum):
    """The end of a rendered conversation, after which the model writes."""

    ANSWER_BEGUN = auto()
    """The marker with which an answer begins."""
    MESSAGE_ENDED = auto()
    """The end of the last message: the model writes the marker of the next speaker itself."""
    MESSAGE_OPEN = auto()
    """The text of the last message, without an end: the model continues it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that the model's chat template renders."""

    messages: tuple[Message, ...]
    """As chat templates take them (messages.py)."""
    end: ConversationEnd = ConversationEnd.ANSWER_BEGUN


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompts:
    """Prompts as text or as tokens."""

    contents: tuple[str | tuple[int, ...], ...]
    infill: Infill | None = None
    """Set if the answer fills the gap between each text and another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One checked request for text. Limits that depend on the prompt's tokens are checked later."""

    model: str
    prompt: Conversation | TextPrompts
    max_tokens: int | None
    sampling: SamplingParams
    """Without a seed."""
    seed: int | None
    stops: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    n: int = 1
    """Choices of each prompt."""
    top_logprobs: int | None = None
    """Alternatives to report for each token; None reports no log probabilities."""
    is_echoed: bool = False
    is_prompt_only: bool = False
    """True if the answer is the echo, without a new token."""
    has_prompt_logprobs: bool = False
    """True to report log probabilities of the prompt's tokens."""
    has_performance: bool = False
    is_fitted: bool = False
    """True if `max_tokens` may be lowered to the room that is left."""
    is_resumable: bool = False
    """True if the answer, to one prompt, comes with resume records: beside its events, or in signs of progress."""
    resumed: ResumePoint | None = None
    format: output_options.RequiredText | None = None
    """The form that the text must have."""
    toolbox: output_options.Toolbox | None = None
    min_tokens: int = 0
    """Number of tokens before which no token may end the text; larger than any answer if none ever may."""
    effort: str | None = None
    """Reasoning effort."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, which win over those that follow from other parameters."""
    cache_salt: str = ""
    """Requests with different salts share no cached prefixes."""
    default_max_tokens: int | None = None
    """The deployment's limit for requests without `max_tokens`; None leaves it to the endpoint."""
    refuses_unknown: bool = False
    """True if parameters that the model cannot follow are refused; they are left out otherwise."""
    ignored: tuple[str, ...] = ()
    """Names of parameters that were left out."""

    @property
    def is_chat(self) -> bool:
        """Return whether the request came to the chat endpoint."""
        return isinstance(self.prompt, Conversation)

    @property
    def continues_text(self) -> bool:
        """Return whether the answer continues a text of the client, so that a blank at its beginning counts."""
        prompt = self.prompt
        return not isinstance(prompt, Conversation) or prompt.end is ConversationEnd.MESSAGE_OPEN

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return 1 if isinstance(self.prompt, Conversation) else len(self.prompt.contents)

    @property
    def size(self) -> int:
        """The number of choices of all prompts."""
        return self.prompts * self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPolicy:
    """The deployment's rules for the bodies of its requests."""

    context_length: int | None = None
    """Lists of more tokens are refused before their tokens are looked at; None accepts any."""
    sampling: Sampling = _NO_SAMPLING
    """Values for requests that leave them out."""
    refuses_unknown: bool = False
    """True if parameters that only other servers have are refused; they are left out otherwise."""
    always_performance: bool = False
    """True if answers have the member `performance` unless the request says false."""
    sees_images: bool = False
    """True if messages may have images."""

    def fill_in(self, fields: dict[str, Any]) -> None:
        """Add the deployment's values to a body; `max_tokens` is resolved later, when the prompt's length is known."""
        given = self.sampling.model_dump(exclude_none=True, exclude={"max_tokens"})
        if fields.get("repeat_penalty") is not None:  # another name of the same
            given.pop("repetition_penalty", None)
        for name, value in given.items():
            if fields.get(name) is None:
                fields[name] = value
        if self.always_performance and fields.get("include_performance") is None:
            fields["include_performance"] = True


USUAL_POLICY = RequestPolicy()


def parse_chat(
    raw: bytes, *, is_resumable: bool = False, policy: RequestPolicy = USUAL_POLICY
) -> GenerationRequest:
    """Parse the body of a chat request; the field `fleet` is allowed only with `is_resumable`.

    Raises:
        RefusedError: a value is wrong or not supported.

    """
    fields = read_object(raw)
    resumed = _pop_resume_point(fields, policy.context_length) if is_resumable else None
    ignored = CHAT_PARAMETERS.check(fields, refuses_unknown=policy.refuses_unknown)
    left_out = messages.normalize(fields.get("messages"), sees_images=policy.sees_images)
    _drop_no_limit(fields)
    policy.fill_in(fields)
    body = validate(ChatBody, fields)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise errors.invalid(
            "'max_tokens' and 'max_completion_tokens' cannot both be set.", param="max_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise errors.invalid(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )
    request = GenerationRequest(
        prompt=_read_conversation(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        format=_read_form(body),
        toolbox=output_options.read_tools(
            body.tools, _read_tool_choice(body.tool_choice), is_parallel=body.parallel_tool_calls
        ),
        effort=body.reasoning_effort,
        refuses_unknown=policy.refuses_unknown,
        template_variables=template_variables.read_variables(body.chat_template_kwargs),
        default_max_tokens=policy.sampling.max_tokens,
        ignored=(*ignored, *left_out),
        **_common_fields(body),
    )
    _check_end(request, body)
    return request if not is_resumable else _with_resume_point(request, resumed)


def parse_completion(
    raw: bytes, *, is_resumable: bool = False, policy: RequestPolicy = USUAL_POLICY
) -> GenerationRequest:
    """Parse the body of a completion request; the field `fleet` is allowed only with `is_resumable`.

    Raises:
        RefusedError: a value is wrong or not supported.

    """
    fields = read_object(raw)
    resumed = _pop_resume_point(fields, policy.context_length) if is_resumable else None
    ignored = COMPLETION_PARAMETERS.check(fields, refuses_unknown=policy.refuses_unknown)
    prompts.check_token_lists(fields.get("prompt"), policy.context_length)
    _drop_no_limit(fields)
    policy.fill_in(fields)
    body = validate(CompletionBody, fields)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise errors.invalid(
            "'best_of' must equal 'n': this engine returns all choices that it generates.",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise errors.invalid("'max_tokens' is 0 only with 'echo'.", param="max_tokens")
    extra, is_echoed = body.input_extra, bool(body.echo)
    infill = prompts.read_infill(body.prompt, body.suffix, extra, is_echoed=is_echoed)
    request = GenerationRequest(
        prompt=TextPrompts(contents=prompts.prompt_contents(body.prompt), infill=infill),
        # Tokens of the prompt are scored on the way to the first new one.
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        is_prompt_only=body.max_tokens == 0,
        top_logprobs=body.logprobs,
        has_prompt_logprobs=is_echoed and body.logprobs is not None and resumed is None,
        is_echoed=is_echoed,
        format=structured_outputs.read(body),
        default_max_tokens=policy.sampling.max_tokens,
        ignored=ignored,
        **_common_fields(body),
    )
    _check_end(request, body)
    return request if not is_resumable else _with_resume_point(request, resumed)


def read_sampling(body: SamplingBody) -> SamplingParams:
    """Return the sampling parameters, without a seed.

    Raises:
        RefusedError: a key of `logit_bias` is not a token id, or both names of the repetition penalty are given.

    """
    if body.repetition_penalty is not None and body.repeat_penalty is not None:
        raise errors.invalid(
            "'repeat_penalty' is llama.cpp's name of 'repetition_penalty'; give one of them.",
            param="repeat_penalty",
        )
    given: dict[str, Any] = {
        name: value
        for name in (
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "xtc_probability",
            "xtc_threshold",
        )
        if (value := getattr(body, name)) is not None
    }
    if (penalty := body.repetition_penalty or body.repeat_penalty) is not None:
        given["repetition_penalty"] = penalty
    top_k, top_p = max(body.top_k or 0, 0), body.top_p  # -1 is vLLM's "no limit"
    if top_p == 0:
        # The smallest set of tokens with any probability is the most probable token.
        top_k, top_p = 1, None
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k,
        logit_bias=_logit_bias(body.logit_bias or {}),
        **given,
    )


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not (token.isascii() and token.isdecimal() and str(int(token[:20])) == token):
            raise errors.invalid(
                f"The keys of 'logit_bias' must be token ids; '{token[:50]}' is not one.",
                param="logit_bias",
            )
    return tuple(sorted((int(token), bias) for token, bias in biases.items() if bias))


def _read_conversation(body: ChatBody) -> Conversation:
    turns = messages.to_template(body.messages)
    if not body.continue_final_message:
        is_ended = body.add_generation_prompt is False
        end = ConversationEnd.MESSAGE_ENDED if is_ended else ConversationEnd.ANSWER_BEGUN
        return Conversation(messages=turns, end=end)
    if body.add_generation_prompt:
        raise errors.invalid(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true: an answer continues the last "
            "message, or begins a new one.",
            param="add_generation_prompt",
        )
    last = turns[-1]
    if last["role"] != "assistant" or not last.get("content") or last.get("tool_calls"):
        raise errors.invalid(
            "'continue_final_message' needs a last message of the assistant with text and without tool calls.",
            param="continue_final_message",
        )
    return Conversation(messages=turns, end=ConversationEnd.MESSAGE_OPEN)


def _read_form(body: ChatBody) -> output_options.RequiredText | None:
    form = structured_outputs.read(body)
    value = body.response_format
    if value is None:
        return form
    wanted = output_options.read_format(
        validate(output_options.format_model(value), value, at="response_format")
    )
    if form is not None and wanted is not None:
        message = f"An answer has one form; 'response_format' and '{form.param}' ask for two."
        raise errors.invalid(message, param=form.param)
    return form or wanted


def _check_end(request: GenerationRequest, body: _GenerationBody) -> None:
    """Refuse a least length of an answer that ends where its form does."""
    if request.min_tokens and (request.format is not None or request.toolbox is not None):
        name = "tools" if request.format is None else request.format.param.split(".")[0]
        raise errors.invalid(
            f"'min_tokens' and 'ignore_eos' cannot be combined with '{name}': an answer ends where its format does.",
            param="min_tokens" if body.min_tokens else "ignore_eos",
        )


def _read_tool_choice(value: str | dict[str, Any] | None) -> output_options.Choice | None:
    if value is None or isinstance(value, str):
        return output_options.parse_choice_mode(value)
    return validate(output_options.choice_model(value), value, at="tool_choice")


def _drop_no_limit(fields: dict[str, Any]) -> None:
    """Let a limit of -1, which LM Studio and llama.cpp take for none, be the rest of the context."""
    given = [name for name in ("max_tokens", "max_completion_tokens") if fields.get(name) == -1]
    for name in given:
        fields[name] = _NEVER
        fields.setdefault("fit_max_tokens", True)


def _common_fields(body: _GenerationBody) -> dict[str, Any]:
    """Return the fields of a GenerationRequest that both endpoints have."""
    if body.stream_options is not None and not body.stream:
        raise errors.invalid(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return {
        "model": body.model,
        "sampling": read_sampling(body),
        "seed": body.seed,
        "stops": tuple(body.stop or ()),
        "min_tokens": _NEVER if body.ignore_eos else body.min_tokens or 0,
        "n": body.n or 1,
        "is_streamed": bool(body.stream),
        "has_usage": bool(body.stream_options and body.stream_options.include_usage),
        "has_performance": bool(body.include_performance),
        "is_fitted": bool(body.fit_max_tokens),
        "cache_salt": body.cache_salt or "",
    }


def with_key_salt(request: GenerationRequest, key_salt: str) -> GenerationRequest:
    """Return the request with the salt of its sender's API key; the body's own salt divides that key's cache."""
    if not key_salt and not request.cache_salt:
        return request
    # A key's salt has no colon, so no body can spell the salt of another key.
    return dataclasses.replace(request, cache_salt=f"{key_salt}:{request.cache_salt}")


def _pop_resume_point(fields: dict[str, Any], context_length: int | None) -> ResumePoint | None:
    value = fields.pop(streams.RESUME_FIELD, None)
    if value is None:
        return None
    if isinstance(value, dict):
        each = value.get("choices")
        for tokens in (value.get("tokens"), *(each[:1024] if isinstance(each, list) else ())):
            prompts.check_tokens(tokens, context_length, f"{streams.RESUME_FIELD}.tokens")
    resumed = validate(ResumePoint, value, at=streams.RESUME_FIELD)
    if (resumed.tokens is None) == (resumed.choices is None):
        raise errors.invalid(
            "'fleet' has the tokens of the only choice in 'tokens', or of each one in 'choices'.",
            param="fleet.tokens",
        )
    return resumed


def _with_resume_point(
    request: GenerationRequest, resumed: ResumePoint | None
) -> GenerationRequest:
    # Log probabilities of tokens that another engine generated are not known here; a stream has sent them already.
    is_known = request.is_streamed or request.top_logprobs is None
    if resumed is not None and not is_known:
        message = "'fleet' continues no answer with log probabilities that is not streamed."
        raise errors.invalid(message, param="fleet")
    if resumed is not None and request.prompts != 1:
        raise errors.invalid("'fleet' continues one prompt; 'prompt' has more.", param="prompt")
    if resumed is not None and len(resumed.emitted) != request.n:
        message = f"'fleet' continues {len(resumed.emitted)} choices, and 'n' is {request.n}."
        raise errors.invalid(message, param="n")
    is_resumable = is_known and request.prompts == 1
    return dataclasses.replace(request, is_resumable=is_resumable, resumed=resumed)


def read_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object; members that are null are left out.

    Raises:
        RefusedError: the body is not a JSON object.

    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise errors.invalid(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.invalid("The body must be a JSON object.")
    if b"null" in raw:
        nulls.drop_nulls(fields)
    return fields


def validate(kind: type[_B], fields: Any, *, at: str = "") -> _B:
    """Return parsed JSON as a model; `at` is the path of the JSON in the body.

    Raises:
        RefusedError: a value is wrong; names its path.

    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        # Of the errors of a union, the deepest belongs to the member that fits best.
        deepest = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
        param = _error_path([at, *deepest["loc"]] if at else deepest["loc"])
        raise errors.invalid(f"Invalid '{param}': {deepest['msg']}.", param=param) from error


def _error_path(location: Sequence[str | int]) -> str:
    """Return a location in OpenAI's form, `messages[0].content`, without pydantic's union members."""
    text = ""
    before: str | int = ""
    for part in location:
        # A role or a kind of part after an index is the tag of a union member, not a field.
        is_tag = part in ("str", "int") or (isinstance(before, int) and part in messages.TAGS)
        before = part
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and not is_tag:
            text += f".{part}" if text else part
    return text or "body"
