"""`/v1/score` and `/v1/rerank`: refused requests, and cosines of the vectors that `/v1/embeddings` gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.openai import similarity
from schemas.wire.errors import Refusal, RefusedError
from tests.support.engine_embedders import make_embedder
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
DOCUMENTS = ["the sky is blue", "hello world", "a third text", "hello world"]


@pytest.fixture(scope="module")
def own(tiny: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_embedder(tiny, tmp_path_factory.mktemp("vectors") / "model")
    with forking(tmp_path_factory.mktemp("engine"), blas_cache) as function:
        engine = function(folder, context_length=600)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


def refused(parse: Any, **fields: Any) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        parse(json.dumps({"model": "m"} | fields).encode())
    return caught.value.refusal


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "", "text_2": "x"}, "text_1"),
        ({"text_1": "x", "text_2": []}, "text_2"),
        ({"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_1"),
        ({"text_1": ["x", "y"], "text_2": "x"}, "text_1"),
        ({"text_1": "x", "text_2": ["x"] * 2048}, "text_2"),
        ({"text_1": ["x"] * 1500, "text_2": ["x"] * 1500}, "text_2"),
        ({"text_1": "x", "text_2": "x", "typo": 1}, "typo"),
    ],
)
def test_wrong_pairs_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    refusal = refused(similarity.parse_score, **fields)
    assert (refusal.status, refusal.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["x"]}, "query"),
        ({"query": "", "documents": ["x"]}, "query"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": ["x"] * 2048}, "documents"),
        ({"query": "x", "documents": [{"text": ""}]}, "documents"),
        ({"query": "x", "documents": [{"image": "y"}]}, "documents[0].DocumentText.text"),
        ({"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
    ],
)
def test_wrong_documents_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    refusal = refused(similarity.parse_rerank, **fields)
    assert (refusal.status, refusal.param) == (400, param)


def vectors(own: Engine, texts: list[str]) -> Any:
    answer = own.post("/v1/embeddings", input=texts).json
    return np.array([item["embedding"] for item in answer["data"]])


@pytest.mark.ci
def test_scores_are_the_cosines_of_the_embeddings(own: Engine) -> None:
    rows = vectors(own, ["hello world", *DOCUMENTS])
    answer = own.post("/v1/score", text_1="hello world", text_2=DOCUMENTS).json
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    scores = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(scores, rows[1:] @ rows[0], atol=1e-5)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    pairs = own.post("/v1/score", text_1=DOCUMENTS, text_2=DOCUMENTS).json["data"]
    np.testing.assert_allclose([item["score"] for item in pairs], 1, atol=1e-5)
    assert all(item["score"] <= 1 for item in pairs)
    assert own.busy() == (0, 0)


def test_documents_come_in_the_order_of_their_similarity(own: Engine) -> None:
    documents: list[Any] = [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}, DOCUMENTS[3]]
    answer = own.post("/v1/rerank", query="hello world", documents=documents).json
    scores = {
        item["index"]: item["score"]
        for item in own.post("/v1/score", text_1="hello world", text_2=DOCUMENTS).json["data"]
    }
    order = [item["index"] for item in answer["results"]]
    assert order[:2] == [1, 3]
    assert order == sorted(range(4), key=lambda at: (-round(scores[at], 4), at))
    assert [item["document"]["text"] for item in answer["results"]] == [
        DOCUMENTS[at] for at in order
    ]
    best = own.post(
        "/v1/rerank", query="hello world", documents=DOCUMENTS, top_n=1, return_documents=False
    ).json["results"]
    assert [(item["index"], item.keys()) for item in best] == [(1, {"index", "relevance_score"})]


def test_a_text_over_the_context_is_named(own: Engine) -> None:
    long = "hello " * 2_000
    reply = own.post("/v1/rerank", query="x", documents=["y", long])
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == "documents[1]"
    assert own.post("/v1/score", text_1=long, text_2="x").error["param"] == "text_1"


def test_a_text_model_has_no_scores(engine: Engine) -> None:
    reply = engine.post("/v1/score", text_1="x", text_2="y")
    assert (reply.status, reply.error["code"]) == (400, "not_an_embedding_model")
    assert "neither an embedding model nor a cross-encoder" in reply.error["message"]
