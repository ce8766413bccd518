"""Embeddings: which folders make them, what the vectors are, and the endpoint as OpenAI's own client sees it."""

import base64
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from engine.errors import Refusal, RefusedError
from engine.jobs import (
    EmbeddingOutput,
    EmbedJob,
    Job,
    JobFailure,
    SamplingParams,
    TokenOutput,
    WorkerEvent,
)
from engine.model import pooler
from engine.openai import embeddings
from engine.openai.input_processor import InputProcessor, TokenizerPool
from engine.ports import ServedModel
from models import model_files
from models.model_files import ModelUnusableError
from tests.engine.batch.batches import load, load_once, module, new_batch
from tests.engine.conftest import START_S, Engine, eventually, launching

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

MODES = ["cls", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
TEXTS = [
    tuple((7 * row + 3 * at) % 480 + 10 for at in range(n))
    for row, n in enumerate((3, 70, 1, 21, 200, 8))
]


def write(folder: Path, name: str, tree: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(tree))


def make_embedder(
    tiny: Path, out: Path, *, mode: str = "lasttoken", normalize: bool = True
) -> Path:
    """Copy a text model and add what sentence-transformers saves."""
    folder = shutil.copytree(tiny, out)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listing = [
        {
            "idx": at,
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    write(folder, "modules.json", listing)
    write(folder, "1_Pooling/config.json", {"pooling_mode": mode, "include_prompt": True})
    return folder


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tiny, tmp_path_factory.mktemp("vectors") / "model")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_once(folder)


def how(mode: str, *, normalize: bool = False) -> pooler.PoolerConfig:
    return pooler.PoolerConfig(mode=mode, width=64, is_normalized=normalize)  # type: ignore[arg-type]


def run(embedder: Any, tokens: int, most: int = 10_000) -> tuple[list[WorkerEvent], int]:
    """Step until idle; return the events and the number of steps."""
    events: list[WorkerEvent] = []
    for count in range(1, most):
        events += embedder.step(tokens)
        if embedder.is_idle:
            return events, count
    raise AssertionError("it never ends")


def vectors(event: WorkerEvent) -> Any:
    assert isinstance(event, EmbeddingOutput), event
    return np.array([np.frombuffer(vector, "<f4") for vector in event.vectors])


def embedded(model: Any, pool: pooler.PoolerConfig, texts: Any = TEXTS, tokens: int = 10**6) -> Any:
    embedder = module("engine.batch.embedder").Embedder(model, pool)
    embedder.add(EmbedJob(id=1, prompts=tuple(texts)))
    (event,), _ = run(embedder, tokens)
    return vectors(event)


def by_hand(mode: str, hidden: Any) -> Any:
    """Pool one text's hidden states, [tokens, width], as sentence-transformers describes it."""
    ranks = np.arange(1, len(hidden) + 1)[:, None]
    pooled = {
        "cls": hidden[0],
        "lasttoken": hidden[-1],
        "mean": hidden.mean(axis=0),
        "mean_sqrt_len_tokens": hidden.sum(axis=0) / np.sqrt(len(hidden)),
        "weightedmean": (hidden * ranks).sum(axis=0) / ranks.sum(),
    }
    return pooled[mode]


@pytest.mark.parametrize("mode", MODES)
def test_vectors_are_what_the_mode_says_however_they_are_cut(loaded: Any, mode: str) -> None:
    mx = module("mlx.core")
    plain = [np.array(loaded.model.model(mx.array([text])))[0] for text in TEXTS]
    wanted = np.array([by_hand(mode, hidden) for hidden in plain])
    for tokens in (16, 64, 10**6):
        found = embedded(loaded.model, how(mode), tokens=tokens)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    found = embedded(loaded.model, how(mode, normalize=True))
    np.testing.assert_allclose(found, pooler.normalize(wanted), rtol=1e-4, atol=1e-5)


def test_a_step_reads_no_more_than_it_may_and_jobs_come_and_go(loaded: Any) -> None:
    alone = embedded(loaded.model, how("mean"))
    embedder = module("engine.batch.embedder").Embedder(loaded.model, how("mean"))
    embedder.add(EmbedJob(id=1, prompts=(TEXTS[4],)))
    assert embedder.step(50) == []
    embedder.add(EmbedJob(id=2, prompts=tuple(TEXTS)))
    embedder.add(EmbedJob(id=3, prompts=(TEXTS[1],)))
    embedder.remove(1)  # in the middle of its text
    embedder.remove(99)
    events, steps = run(embedder, 50)
    assert [event.job_id for event in events] == [2, 3]
    assert steps >= (sum(len(text) for text in TEXTS) + len(TEXTS[1])) / 50
    np.testing.assert_allclose(vectors(events[0]), alone, rtol=1e-4, atol=1e-5)


def test_a_failed_step_costs_what_waits_here_and_nothing_else(loaded: Any) -> None:
    embedder = module("engine.batch.embedder").Embedder(loaded.model, how("cls"))
    inner, embedder._inner = embedder._inner, None
    embedder.add(EmbedJob(id=1, prompts=(TEXTS[0],)))
    embedder.add(EmbedJob(id=2, prompts=(TEXTS[1],)))
    faults = embedder.step(8)
    assert [(type(fault), fault.job_id) for fault in faults] == [(JobFailure, 1), (JobFailure, 2)]
    embedder._inner = inner
    embedder.add(EmbedJob(id=3, prompts=(TEXTS[0],)))
    assert len(run(embedder, 8)[0]) == 1


def test_streams_go_on_between_the_pieces_of_a_long_list(loaded: Any, folder: Path) -> None:
    batch = new_batch(loaded, folder)
    batch.add(Job(id=1, prompt=TEXTS[1], max_tokens=4000, sampling=SamplingParams(temperature=0)))
    for _ in range(5):
        list(batch.step())
    batch.add(EmbedJob(id=2, prompts=tuple(TEXTS * 40)))
    made, steps, done = 0, 0, False
    while not done:
        events = [event for some in batch.step() for event in some]
        made += sum(isinstance(event, TokenOutput) for event in events)
        done = any(isinstance(event, EmbeddingOutput) for event in events)
        steps += 1
    assert steps > 3
    assert made >= steps - 1  # a token of the stream in every step
    batch.remove(1)
    list(batch.step())
    assert batch.is_idle


def test_a_checkpoint_without_a_head_or_a_prefix(loaded: Any, folder: Path, tmp_path: Path) -> None:
    """Qwen's own Qwen3-Embedding-8B: inner names, no head, and a config that says it is not tied."""
    mx = module("mlx.core")
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "model.safetensors.index.json").unlink()
    tensors = mx.load(str(folder / "model.safetensors"))
    own = {
        name.removeprefix("model."): one for name, one in tensors.items() if "lm_head" not in name
    }
    mx.save_safetensors(str(bare / "model.safetensors"), own, metadata={"format": "mlx"})
    found = load(bare)
    assert (loaded.has_head, found.has_head) == (True, False)
    assert found.pooling == how("lasttoken", normalize=True)
    np.testing.assert_array_equal(
        embedded(found.model, how("mean")), embedded(loaded.model, how("mean"))
    )


async def test_a_model_without_a_head_generates_nothing(loaded: Any) -> None:
    lanes = TokenizerPool()
    ready = ServedModel(codec=loaded.codec, vocab_size=512, pooling=how("mean"), has_head=False)
    processor = InputProcessor(
        ready=ready, context_length=100, concurrency=1, lanes=lanes, fingerprint="f"
    )
    bodies = sys.modules["engine.openai.request_body"]
    with pytest.raises(RefusedError, match="generates no text") as caught:
        await processor.choices(
            bodies.parse_completion(b'{"model":"m","prompt":"x"}'), first_id=1, fresh_seed=1
        )
    lanes.close()
    assert caught.value.refusal.code == "not_a_text_model"


def old_names(folder: Path) -> None:
    switches = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write(folder, "1_Pooling/config.json", {"word_embedding_dimension": 64, **switches})
    write(folder, "sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": False})
    prompts = {
        "prompts": {"doc": "doc: "},
        "default_prompt_name": "doc",
        "similarity_fn_name": "cosine",
    }
    write(folder, "config_sentence_transformers.json", prompts)


def test_all_that_a_folder_says_is_read(tiny: Path, tmp_path: Path) -> None:
    facts = model_files.inspect_model(tiny)
    assert pooler.read_config(tiny, facts) is None
    made = make_embedder(tiny, tmp_path / "one", normalize=False)
    assert pooler.read_config(made, facts) == how("lasttoken")
    old_names(made)
    assert pooler.read_config(made, facts) == pooler.PoolerConfig(
        mode="mean", width=64, is_normalized=False, max_tokens=77, prefix="doc: "
    )
    write(made, "modules.json", [{"path": "", "type": "x.Transformer"}])
    assert pooler.read_config(made, facts) is None


WRONG: list[tuple[str, Any, str]] = [
    ("modules.json", {}, "modules.json: content: "),
    (
        "modules.json",
        [{"path": "1_Pooling", "type": "x.Pooling"}, {"path": "2", "type": "x.Dense"}],
        "Dense",
    ),
    ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling max is not supported"),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not"),
    (
        "1_Pooling/config.json",
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        "pooling_mode_cls_token and pooling_mode_mean_tokens",
    ),
    ("1_Pooling/config.json", {}, "pooling none is not supported"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "no prompt 'x'"),
    ("config.json", {"is_causal": False}, "reads in both directions"),
    ("config.json", {"use_bidirectional_attention": "all"}, "reads in both directions"),
]


@pytest.mark.parametrize(("name", "tree", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_what_would_make_wrong_vectors_is_refused(
    tiny: Path, tmp_path: Path, name: str, tree: Any, words: str
) -> None:
    made = make_embedder(tiny, tmp_path / "wrong")
    facts = model_files.inspect_model(made)
    write(made, name, tree)
    with pytest.raises(ModelUnusableError, match=words) as caught:
        pooler.read_config(made, facts)
    assert name in str(caught.value)
    (made / "1_Pooling/config.json").unlink()
    with pytest.raises(ModelUnusableError):
        pooler.read_config(made, facts)


def refused(**fields: Any) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        embeddings.parse(json.dumps({"model": "m", "input": "x"} | fields).encode())
    return caught.value.refusal


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", ""),
        ("input", []),
        ("input", ["a", ""]),
        ("input", [[1], []]),
        ("input", [1, "a"]),
        ("input", [True]),
        ("input", [-1]),
        ("input", None),
        ("input", ["x"] * 2049),
        ("dimensions", 0),
        ("dimensions", "64"),
        ("encoding_format", "int8"),
        ("user", 5),
        ("model", None),
        ("colour", "red"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_requests_that_are_refused_by_name(name: str, value: Any) -> None:
    refusal = refused(**{name: value})
    assert (refusal.status, (refusal.param or "").partition("[")[0]) == (400, name)
    assert name in refusal.message


@pytest.fixture(scope="module")
def own(
    folder: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with launching(tmp_path_factory.mktemp("engine"), blas_cache) as function:
        engine = function(folder, context_length=600, concurrency=4, queue_limit=16)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@pytest.fixture(scope="module")
def ask(own: Engine) -> Iterator[Callable[..., Any]]:
    with openai.OpenAI(base_url=own.url, api_key="none", max_retries=0) as client:

        def function(given: Any, **fields: Any) -> Any:
            return client.embeddings.create(model="tiny", input=given, **fields)

        yield function


def test_every_shape_of_input(own: Engine, ask: Callable[..., Any]) -> None:
    texts = ["hello world", "one", "grüße, 世界 🌍 " * 20, "hello world"]
    answer = ask(texts)
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    assert (answer.object, answer.model) == ("list", "tiny")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 100
    rows = np.array([one.embedding for one in answer.data])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(rows[0], rows[3], atol=1e-6)
    alone = np.array([ask(text).data[0].embedding for text in texts])
    np.testing.assert_allclose(rows, alone, atol=1e-5)
    by_token = ask([[10, 20], [30]])
    assert by_token.usage.prompt_tokens == 3
    one = np.array(ask([10, 20]).data[0].embedding)
    np.testing.assert_allclose(one, by_token.data[0].embedding, atol=1e-6)
    assert own.busy() == (0, 0)


def test_formats_and_dimensions(own: Engine, ask: Callable[..., Any]) -> None:
    whole = np.array(ask("hello", encoding_format="float").data[0].embedding)
    packed = own.post("/v1/embeddings", input="hello", encoding_format="base64").json
    bare = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(bare, whole.astype("<f4"))
    short = np.array(ask("hello", dimensions=16).data[0].embedding)
    np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    assert len(ask("hello", dimensions=64).data[0].embedding) == 64
    with pytest.raises(
        openai.BadRequestError, match="'dimensions' is 65; this model's vectors have 64"
    ):
        ask("hello", dimensions=65)


def test_what_does_not_fit(ask: Callable[..., Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 600") as caught:
        ask([[10], [10] * 601])
    assert (caught.value.param, caught.value.code) == ("input[1]", "context_length_exceeded")
    assert len(ask([[10] * 600]).data) == 1
    with pytest.raises(openai.BadRequestError, match="not in the model's vocabulary"):
        ask([10, 512])
    with pytest.raises(openai.BadRequestError, match="a request may have 300000"):
        ask([[10] * 600] * 501)


def test_many_clients_and_one_that_generates(own: Engine, ask: Callable[..., Any]) -> None:
    texts = [f"number {n} " * (n + 1) for n in range(12)]
    alone = [ask(text).data[0].embedding for text in texts]
    said = own.chat(max_tokens=40).json
    with ThreadPoolExecutor(13) as pool:
        talk = pool.submit(own.chat, max_tokens=40)
        together = list(pool.map(lambda text: ask(text).data[0].embedding, texts))
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert talk.result().json["choices"] == said["choices"]


def test_a_client_that_leaves_frees_its_slot(own: Engine) -> None:
    connection = own.connect()
    body = json.dumps({"model": "tiny", "input": [[10] * 600] * 400})
    connection.request("POST", "/v1/embeddings", body)
    eventually(lambda: own.busy() == (1, 0))
    connection.close()
    eventually(lambda: own.busy() == (0, 0))
    late = own.post(
        "/v1/embeddings", headers={"x-request-timeout": "0.01"}, input=[[10] * 600] * 400
    )
    assert (late.status, late.error["code"]) == (504, "request_timeout")
    eventually(lambda: own.busy() == (0, 0))
    assert own.post("/v1/embeddings", input="x").status == 200


def test_a_text_model_says_what_it_lacks(engine: Engine) -> None:
    reply = engine.post("/v1/embeddings", input="hello")
    assert (reply.status, reply.error["code"]) == (400, "not_an_embedding_model")
    assert "1_Pooling/config.json" in reply.error["message"]
