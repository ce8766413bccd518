"""`/v1/embeddings`: from the bytes of a request to a job, and from vectors to the bytes of an answer.

Knows nothing of HTTP. Texts become tokens in the tokenizer's threads.
"""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field

from engine import errors
from engine.jobs import EmbeddingOutput, EmbedJob
from engine.model import pooler
from engine.model.pooler import PoolerConfig
from engine.openai import limits, request_body
from engine.openai.input_processor import InputProcessor
from engine.openai.parameters import EndpointParameters
from engine.openai.request_body import Token
from engine.ports import Codec

EmbeddingInput: TypeAlias = str | tuple[int, ...]

# OpenAI's own limits, a request.
_MAX_INPUTS, _MAX_TOKENS = 2048, 300_000


class EmbeddingBody(BaseModel):
    """What `/v1/embeddings` takes."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    input: str | list[str] | list[Token] | list[list[Token]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """What one client wants to have embedded."""

    model: str
    inputs: tuple[EmbeddingInput, ...]
    is_base64: bool
    dimensions: int | None


def accepted_parameters() -> EndpointParameters:
    """Return the names of `/v1/embeddings`."""
    honoured = frozenset({"model", "input", "encoding_format", "dimensions"})
    return EndpointParameters(honoured=honoured, labels=frozenset({"user"}), limited={})


def parse(raw: bytes) -> EmbeddingRequest:
    """Read a body.

    Raises:
        RefusedError: it asks for something that is wrong or that the engine does not do.

    """
    fields = request_body.read_object(raw)
    accepted_parameters().check(fields)
    body = request_body.validate(EmbeddingBody, fields)
    inputs = _inputs(body.input)
    if not inputs or "" in inputs or () in inputs:
        raise errors.invalid("'input' must not be empty, nor any part of it.", param="input")
    if len(inputs) > _MAX_INPUTS:
        message = f"'input' has {len(inputs)} parts; a request may have {_MAX_INPUTS}."
        raise errors.invalid(message, param="input")
    return EmbeddingRequest(
        model=body.model,
        inputs=inputs,
        is_base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
    )


def _inputs(given: str | list[str] | list[int] | list[list[int]]) -> tuple[EmbeddingInput, ...]:
    if isinstance(given, str):
        return (given,)
    if given and isinstance(given[0], int):
        return (tuple(given),)
    return tuple(one if isinstance(one, str) else tuple(cast("list[int]", one)) for one in given)


async def build_job(
    request: EmbeddingRequest, processor: InputProcessor, *, job_id: int
) -> EmbedJob:
    """Return what the worker has to do.

    Raises:
        RefusedError: the model makes no embeddings, or not of this.

    """
    how = processor.ready.pooling
    if how is None:
        raise errors.invalid(
            "This model generates text; it is not an embedding model: its folder has no "
            "modules.json and 1_Pooling/config.json of sentence-transformers.",
            param="model",
            code="not_an_embedding_model",
        )
    if request.dimensions is not None and request.dimensions > how.width:
        message = f"'dimensions' is {request.dimensions}; this model's vectors have {how.width}."
        raise errors.invalid(message, param="dimensions")
    lane = processor.lanes.for_length(sum(len(one) for one in request.inputs))
    tokens = await asyncio.get_running_loop().run_in_executor(
        lane, _tokenize, request.inputs, how.prefix, processor.ready.codec
    )
    most = min(processor.context_length, how.max_tokens or processor.context_length)
    _check_lengths(tokens, most, processor.ready.vocab_size)
    return EmbedJob(id=job_id, prompts=tuple(tokens))


def _tokenize(inputs: Sequence[EmbeddingInput], prefix: str, codec: Codec) -> list[tuple[int, ...]]:
    return [
        tuple(codec.encode_text(prefix + one)) if isinstance(one, str) else one for one in inputs
    ]


def _check_lengths(tokens: Sequence[tuple[int, ...]], most: int, vocab_size: int) -> None:
    for at, one in enumerate(tokens):
        where = "input" if len(tokens) == 1 else f"input[{at}]"
        limits.check_tokens(one, vocab_size, param=where)
        if len(one) > most:
            message = (
                f"This model's maximum context length is {most} tokens. However, your {where} "
                f"resulted in {len(one)} tokens. Please reduce its length."
            )
            raise errors.invalid(message, param=where, code="context_length_exceeded")
    total = sum(len(one) for one in tokens)
    if total > _MAX_TOKENS:
        message = f"'input' has {total} tokens; a request may have {_MAX_TOKENS}."
        raise errors.invalid(message, param="input")


def encode_response(
    request: EmbeddingRequest, how: PoolerConfig, asked: EmbedJob, made: EmbeddingOutput
) -> bytes:
    """Return the answer; takes some 50 ms for thousands of vectors, so it belongs into a thread."""
    vectors = np.frombuffer(b"".join(made.vectors), dtype="<f4").reshape(-1, how.width)
    if request.dimensions is not None and request.dimensions < how.width:
        vectors = np.ascontiguousarray(vectors[:, : request.dimensions])
        if how.is_normalized:
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
    tokens = sum(len(one) for one in asked.prompts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": request.model, "usage": usage}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
