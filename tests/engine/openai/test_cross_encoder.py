"""Cross-encoders at `/v1/rerank` and `/v1/score`: the scores of a reference in numpy, and what such a model refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from engine.model import loader, pooler
from models import model_files
from models.model_files import ModelUnusableError
from nodeagent.engines.health_client import HealthClient
from schemas.wire.engine_address import EngineAddress
from tests.support.engine_embedders import make_cross_encoder, reference_logit
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
QUERY = "which planet is the largest"
DOCUMENTS = [
    "Jupiter is the largest planet of the solar system",
    "hello world",
    "a much longer text " * 40,
    "def make_tokenizer(vocab_size): return vocab_size",
    "x",
]


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tiny, tmp_path_factory.mktemp("cross") / "model")


@pytest.fixture(scope="module")
def own(
    folder: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with forking(tmp_path_factory.mktemp("engine"), blas_cache) as function:
        engine = function(folder, context_length=600)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


def reference(folder: Path, documents: list[str]) -> list[float]:
    """Return the scores, as sentence-transformers computes them: the pair's tokens, and the sigmoid of the logit."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    logits = [
        reference_logit(folder, tokenizer.encode(QUERY, document).ids) for document in documents
    ]
    return [1 / (1 + np.exp(-logit)) for logit in logits]


def test_scores_are_those_of_the_reference(own: Engine, folder: Path) -> None:
    expected = reference(folder, DOCUMENTS)
    assert max(expected) - min(expected) > 0.05, "the reference does not tell these texts apart"
    answer = own.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS).json
    found = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    # Both texts are read together, so their order counts; with vectors it does not.
    turned = own.post("/v1/score", text_1=DOCUMENTS[0], text_2=QUERY).json["data"][0]["score"]
    assert abs(turned - found[0]) > 1e-3
    alone = own.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS[2]).json["data"][0]["score"]
    assert alone == pytest.approx(found[2], abs=2e-4)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = sum(len(tokenizer.encode(QUERY, document).ids) for document in DOCUMENTS)
    assert answer["usage"]["prompt_tokens"] == tokens


def test_documents_come_by_their_scores(own: Engine, folder: Path) -> None:
    expected = reference(folder, DOCUMENTS)
    order = sorted(range(len(DOCUMENTS)), key=lambda at: -expected[at])
    found = own.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=3).json["results"]
    assert [item["index"] for item in found] == order[:3]
    np.testing.assert_allclose(
        [item["relevance_score"] for item in found], [expected[at] for at in order[:3]], atol=2e-4
    )
    assert own.busy() == (0, 0)


@pytest.mark.parametrize(
    ("path", "fields", "code", "advice"),
    [
        ("/v1/embeddings", {"input": "x"}, "not_an_embedding_model", "use /v1/rerank"),
        ("/v1/completions", {"prompt": "x"}, "not_a_text_model", "Use /v1/rerank or /v1/score."),
    ],
)
def test_it_has_no_vectors_and_no_text(
    own: Engine, path: str, fields: dict[str, Any], code: str, advice: str
) -> None:
    reply = own.post(path, **fields)
    assert (reply.status, reply.error["code"]) == (400, code)
    assert advice in reply.error["message"]


async def test_an_agent_probes_it_with_a_pair(own: Engine) -> None:
    client, address = HealthClient(), EngineAddress("127.0.0.1", own.port)
    assert await client.probe(address, "tiny") == ""
    assert await client.golden(address, "tiny") == (None, "")
    assert "first token failed" in await client.probe(address, "other")
    await client.close()


def test_a_pair_over_the_context_is_named(own: Engine) -> None:
    long = "hello " * 2_000
    reply = own.post("/v1/rerank", query="x", documents=["y", long])
    assert (reply.status, reply.error["param"]) == (400, "documents[1]")
    assert own.post("/v1/rerank", query=long, documents=["y"]).error["param"] == "query"


def test_its_config_is_read_or_refused(tiny: Path, tmp_path: Path) -> None:
    def read(folder: Path) -> pooler.PoolerConfig | None:
        return pooler.read_config(folder, model_files.inspect_model(folder))

    plain = read(make_cross_encoder(tiny, tmp_path / "plain", weights_only_inner=True))
    assert plain is not None
    assert (plain.score, plain.mode, plain.output_width) == ("Sigmoid", "lasttoken", 1)
    linear = read(
        make_cross_encoder(tiny, tmp_path / "linear", activation="torch.nn.modules.linear.Identity")
    )
    assert linear is not None
    assert linear.score == "Identity"
    with pytest.raises(ModelUnusableError, match="sorts texts into 3 classes"):
        read(make_cross_encoder(tiny, tmp_path / "three", labels=3))
    with pytest.raises(ModelUnusableError, match=r"Softmax is not supported"):
        read(make_cross_encoder(tiny, tmp_path / "softmax", activation="torch.nn.Softmax"))


def test_weights_without_the_prefix_of_the_inner_model_are_read(tiny: Path, tmp_path: Path) -> None:
    folder = make_cross_encoder(tiny, tmp_path / "model", weights_only_inner=True)
    config = pooler.read_config(folder, model_files.inspect_model(folder))
    assert config is not None
    model, _ = loader.load_embedding_model(folder, config)
    stored = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(np.array(model.score.weight), stored["score.weight"])
    np.testing.assert_array_equal(np.array(model.model.norm.weight), stored["norm.weight"])


def test_activations() -> None:
    logits = np.array([[-1000.0], [0.0], [3.0]], np.float32)
    np.testing.assert_allclose(
        pooler.activate(logits, "Sigmoid")[:, 0], [0, 0.5, 1 / (1 + np.exp(-3))], rtol=1e-6
    )
    assert pooler.activate(logits, "Identity") is logits
