"""Requests and responses of `/v1/score` and `/v1/rerank`: similarity of texts, by a cross-encoder or by vectors.

The forms are those of vLLM, Jina and Cohere. A cross-encoder reads both texts of a pair together, and its score is the
model's own, usually from 0 to 1. With an embedding model, a score is the cosine of two vectors, from -1 to 1. Nothing
here knows HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import numpy as np
import orjson
from pydantic import Field

from engine.model import pooler
from engine.model.pooler import PoolerConfig
from engine.openai import embeddings, parameters, request_body
from engine.openai.embeddings import EmbeddedTexts, EmbeddingRequest, Truncation
from engine.openai.parameters import EndpointParameters, LenientModel, StrictModel
from schemas.wire import errors

# A request's texts are embedded together; one place is for the query.
_MAX_DOCUMENTS = embeddings.MAX_INPUTS - 1


class ScoreBody(LenientModel):
    """Body of `/v1/score`: one text against one or several, or texts in pairs."""

    model: str
    text_1: str | list[str]
    text_2: str | list[str]
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


class DocumentText(StrictModel):
    """A document in its longer form."""

    text: str


class RerankBody(LenientModel):
    """Body of `/v1/rerank`."""

    model: str
    query: str
    documents: list[str | DocumentText]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


SCORE_PARAMETERS: Final = EndpointParameters(model=ScoreBody)
RERANK_PARAMETERS: Final = EndpointParameters(model=RerankBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityRequest:
    """One checked request: texts to embed, and the pairs of them to compare."""

    texts: EmbeddingRequest
    pairs: tuple[tuple[int, int], ...]
    """Indices of the texts of each pair."""
    reranked: RerankBody | None = None
    """Set if the request came to `/v1/rerank`."""

    @property
    def model(self) -> str:
        """The name of the requested model."""
        return self.texts.model

    def inputs_of(self, pooling: PoolerConfig | None) -> EmbeddingRequest:
        """Return what the model reads: each text alone, or with a cross-encoder each pair together."""
        if pooling is None or pooling.score is None:
            return self.texts
        texts = self.texts.inputs
        return replace(
            self.texts,
            inputs=tuple(texts[first] for first, _ in self.pairs),
            seconds=tuple(str(texts[second]) for _, second in self.pairs),
            # A pair is too long because of its longer text, of which a query is the same for all.
            paths=tuple(
                self.texts.paths[max(pair, key=lambda at: len(texts[at]))] for pair in self.pairs
            ),
        )


def parse_score(raw: bytes) -> SimilarityRequest:
    """Parse a body of `/v1/score`.

    Raises:
        RefusedError: a value is wrong, or the numbers of texts do not match.

    """
    fields = request_body.read_object(raw)
    SCORE_PARAMETERS.check(fields)
    for name in ("text_1", "text_2"):
        parameters.check_count(fields.get(name), _MAX_DOCUMENTS, name)
    body = request_body.validate(ScoreBody, fields)
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    _check_texts(firsts, "text_1")
    _check_texts(seconds, "text_2")
    if len(firsts) not in (1, len(seconds)):
        message = (
            f"'text_1' has {len(firsts)} texts and 'text_2' has {len(seconds)}; give one text in 'text_1', or as many "
            "as in 'text_2'."
        )
        raise errors.invalid(message, param="text_1")
    parameters.check_count([*firsts, *seconds], embeddings.MAX_INPUTS, "text_2")
    pairs = tuple((at if len(firsts) > 1 else 0, len(firsts) + at) for at in range(len(seconds)))
    texts = EmbeddingRequest(
        model=body.model,
        inputs=(*firsts, *seconds),
        truncation=body.truncate_prompt_tokens,
        paths=(*_paths(body.text_1, "text_1"), *_paths(body.text_2, "text_2")),
    )
    return SimilarityRequest(texts=texts, pairs=pairs)


def parse_rerank(raw: bytes) -> SimilarityRequest:
    """Parse a body of `/v1/rerank`.

    Raises:
        RefusedError: a value is wrong or not supported.

    """
    fields = request_body.read_object(raw)
    RERANK_PARAMETERS.check(fields)
    parameters.check_count(fields.get("documents"), _MAX_DOCUMENTS, "documents")
    body = request_body.validate(RerankBody, fields)
    texts = [_document_text(document) for document in body.documents]
    _check_texts([body.query], "query")
    _check_texts(texts, "documents")
    return SimilarityRequest(
        texts=EmbeddingRequest(
            model=body.model,
            inputs=(body.query, *texts),
            truncation=body.truncate_prompt_tokens,
            paths=("query", *_paths(texts, "documents")),
        ),
        pairs=tuple((0, 1 + at) for at in range(len(texts))),
        reranked=body,
    )


def _paths(value: str | Sequence[object], param: str) -> list[str]:
    return [param] if isinstance(value, str) else [f"{param}[{at}]" for at in range(len(value))]


def _document_text(document: str | DocumentText) -> str:
    return document if isinstance(document, str) else document.text


def _check_texts(texts: Sequence[str], param: str) -> None:
    if not texts or "" in texts:
        raise errors.invalid(f"Neither '{param}' nor a part of it may be empty.", param=param)


def encode_response(request: SimilarityRequest, embedded: EmbeddedTexts, response_id: str) -> bytes:
    """Return the response body. `response_id` is unique among all requests."""
    if embedded.pooling.score is not None:
        scores = embedded.vectors()[:, 0].tolist()
    else:
        vectors = pooler.normalize(embedded.vectors())
        firsts, seconds = (list(some) for some in zip(*request.pairs, strict=True))
        # Rounding makes the cosine of a vector with itself a little more than 1.
        scores = np.clip(np.einsum("ij,ij->i", vectors[firsts], vectors[seconds]), -1, 1).tolist()
    own: dict[str, Any]
    if request.reranked is None:
        own = {"object": "list", "data": _score_data(scores)}
    else:
        own = {"results": _ranked(request.reranked, scores)}
    shared = {"id": response_id, "model": request.texts.model, "usage": embedded.usage()}
    return orjson.dumps(shared | own)


def _score_data(scores: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"object": "score", "index": index, "score": score} for index, score in enumerate(scores)
    ]


def _ranked(body: RerankBody, scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return the most similar documents first; equal ones stay in their order."""
    order = sorted(range(len(scores)), key=lambda at: -scores[at])
    # 0 is all of them, as in vLLM.
    results: list[dict[str, Any]] = []
    for at in order[: body.top_n or None]:
        result: dict[str, Any] = {"index": at, "relevance_score": scores[at]}
        if body.return_documents is not False:
            result["document"] = {"text": _document_text(body.documents[at])}
        results.append(result)
    return results
