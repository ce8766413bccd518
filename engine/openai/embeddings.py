"""Requests and responses of `/v1/embeddings`: from bytes to a job, and from vectors to bytes.

Nothing here knows HTTP. Texts are tokenized in the input workers.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field

from engine.jobs import EmbeddingOutput, EmbedJob
from engine.model import pooler
from engine.model.pooler import PoolerConfig
from engine.openai import limits, parameters, request_body
from engine.openai.input_processor import InputProcessor, lane_of
from engine.openai.input_tasks import PreparedPrompt, TextsTask
from engine.openai.parameters import EndpointParameters, LenientModel
from engine.openai.prompts import Prompt, context_exceeded
from schemas.wire import errors

EmbeddingInput: TypeAlias = str | tuple[int, ...]

Truncation: TypeAlias = Annotated[int, Field(ge=-1)]
"""vLLM's `truncate_prompt_tokens`: the tokens to which longer texts are cut; -1 for the model's own limit."""

# OpenAI's limits of one request.
MAX_INPUTS, _MAX_TOKENS = 2048, 300_000


class EmbeddingBody(LenientModel):
    """Body of `/v1/embeddings`."""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


PARAMETERS: Final = EndpointParameters(model=EmbeddingBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """One checked request for embeddings."""

    model: str
    inputs: tuple[EmbeddingInput, ...]
    is_base64: bool = False
    dimensions: int | None = None
    truncation: int | None = None
    """As `Truncation`; None refuses longer texts."""
    paths: tuple[str, ...] = ()
    """The place of each input in the body, for refusals; empty if they are in `input`."""
    seconds: tuple[str, ...] = ()
    """The text that a cross-encoder reads after each input; empty for vectors."""

    def path(self, index: int) -> str:
        """Return the place of an input in the body."""
        if self.paths:
            return self.paths[index]
        return "input" if len(self.inputs) == 1 else f"input[{index}]"


def parse(raw: bytes) -> EmbeddingRequest:
    """Parse a body.

    Raises:
        RefusedError: a value is wrong or not supported.

    """
    fields = request_body.read_object(raw)
    PARAMETERS.check(fields)
    _check_count(fields.get("input"))
    body = request_body.validate(EmbeddingBody, fields)
    inputs = _inputs(body.input)
    if not inputs or "" in inputs or () in inputs:
        raise errors.invalid("Neither 'input' nor a part of it may be empty.", param="input")
    return EmbeddingRequest(
        model=body.model,
        inputs=inputs,
        is_base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
        truncation=body.truncate_prompt_tokens,
    )


def _check_count(value: object) -> None:
    """Refuse more inputs or more tokens than a request may have."""
    is_tokens = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    parameters.check_count(value, _MAX_TOKENS if is_tokens else MAX_INPUTS, "input")


def _inputs(value: str | list[str] | list[int] | list[list[int]]) -> tuple[EmbeddingInput, ...]:
    if isinstance(value, str):
        return (value,)
    if value and isinstance(value[0], int):
        return (tuple(value),)
    return tuple(
        part if isinstance(part, str) else tuple(cast("list[int]", part)) for part in value
    )


async def build_job(
    request: EmbeddingRequest, processor: InputProcessor, *, job_id: int
) -> EmbedJob:
    """Return the job of a request.

    Raises:
        RefusedError: the model has no embeddings, or does not support this input.

    """
    pooling = processor.ready.pooling
    if pooling is None:
        kind = (
            "neither an embedding model nor a cross-encoder"
            if request.paths  # of /v1/rerank and /v1/score
            else "not an embedding model"
        )
        raise errors.invalid(
            f"This model generates text; it is {kind}: its folder has no "
            "modules.json and 1_Pooling/config.json of sentence-transformers.",
            param="model",
            code="not_an_embedding_model",
        )
    if pooling.score is not None and not request.seconds:
        raise errors.invalid(
            "This model is a cross-encoder, which compares two texts and has no vectors; use /v1/rerank or /v1/score.",
            param="model",
            code="not_an_embedding_model",
        )
    if request.dimensions is not None and request.dimensions > pooling.width:
        message = (
            f"'dimensions' is {request.dimensions}; this model's vectors have {pooling.width}."
        )
        raise errors.invalid(message, param="dimensions")
    max_length = min(processor.context_length, pooling.max_tokens or processor.context_length)
    prepared = await _tokenize(request, pooling.prefix, processor, max_length)
    prompts = [prompt.tokens for prompt in prepared]
    _check_lengths(request, prompts, max_length, processor.ready.vocab_size)
    starts = tuple(prompt.second_start for prompt in prepared) if request.seconds else ()
    return EmbedJob(id=job_id, prompts=tuple(prompts), second_starts=starts)


async def _tokenize(
    request: EmbeddingRequest, prefix: str, processor: InputProcessor, max_length: int
) -> list[PreparedPrompt]:
    truncate = _truncation(request, max_length)
    inputs = request.inputs
    texts = {at: part for at, part in enumerate(inputs) if isinstance(part, str)}
    prompts = {
        at: PreparedPrompt(tokens=part[:truncate])
        for at, part in enumerate(inputs)
        if not isinstance(part, str)
    }
    if texts:
        task = TextsTask(
            texts=tuple(texts.values()),
            seconds=request.seconds,
            params=tuple(map(request.path, texts)),
            prefix=prefix,
            max_length=max_length,
            truncate=truncate,
        )
        length = sum(map(len, (*task.texts, *task.seconds)))
        prepared_prompts = await processor.inputs.prepare(lane_of(length), task, size=length)
        prompts |= dict(zip(texts, prepared_prompts, strict=True))
    return [prompts[at] for at in range(len(inputs))]


def _truncation(request: EmbeddingRequest, max_length: int) -> int | None:
    """Return the tokens to which longer texts are cut; None if they are refused."""
    tokens = request.truncation
    if tokens is None or tokens == -1:
        return None if tokens is None else max_length
    if not 1 <= tokens <= max_length:
        raise errors.invalid(
            f"'truncate_prompt_tokens' is {tokens}; it must be -1, or from 1 to {max_length}, this model's limit.",
            param="truncate_prompt_tokens",
        )
    return tokens


def _check_lengths(
    request: EmbeddingRequest,
    prompts: Sequence[tuple[int, ...]],
    max_length: int,
    vocab_size: int,
) -> None:
    for at, prompt in enumerate(prompts):
        param = request.path(at)
        limits.check_tokens(prompt, vocab_size, param=param)
        if len(prompt) > max_length:
            raise context_exceeded(param, max_length, len(prompt))
    total = sum(len(prompt) for prompt in prompts)
    if total > _MAX_TOKENS:
        param = request.path(0).partition("[")[0]
        message = f"'{param}' has {total} tokens; a request may have {_MAX_TOKENS}."
        raise errors.invalid(message, param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTexts:
    """The vectors of a request's inputs."""

    job: EmbedJob
    output: EmbeddingOutput
    pooling: PoolerConfig

    def vectors(self) -> npt.NDArray[np.float32]:
        """Return the vectors, one a row."""
        joined = np.frombuffer(b"".join(self.output.vectors), dtype="<f4")
        return joined.reshape(-1, self.pooling.output_width)

    def usage(self) -> dict[str, int]:
        """Return the usage, in OpenAI's form."""
        tokens = sum(len(prompt) for prompt in self.job.prompts)
        return {"prompt_tokens": tokens, "total_tokens": tokens}


def encode_response(request: EmbeddingRequest, embedded: EmbeddedTexts) -> bytes:
    """Return the response body. Takes some 50 ms for thousands of vectors: call it in a thread."""
    vectors, pooling = embedded.vectors(), embedded.pooling
    if request.dimensions is not None and request.dimensions < pooling.width:
        vectors = np.ascontiguousarray(vectors[:, : request.dimensions])
        if pooling.is_normalized:
            vectors = pooler.normalize(vectors)
    data: list[dict[str, Any]] = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode()
            if request.is_base64
            else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    body = {"object": "list", "data": data, "model": request.model, "usage": embedded.usage()}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
