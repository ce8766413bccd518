"""Health and probes of engines over HTTP, also with invalid answers."""

import pytest

from nodeagent.engines.health_client import HealthClient
from tests.support.nodeagent_engine import FakeEngine
from tests.support.nodeagent_groups import GOLDEN


@pytest.mark.parametrize("said", [
    b"", b"[]", b'"Ready"', b"{}", b"\xff", b'{"state":"Ready"}', b'{"replicaUid":"u1"}',
    b'{"state":"Ready","replicaUid":"u2"}',
    pytest.param(b'{"state":"Ready","replicaUid":"u1","message":"' + b"x" * (5 << 20) + b'"}', id="too large"),
])  # fmt: skip
async def test_answers_of_other_processes_are_ignored(
    port: FakeEngine, client: HealthClient, said: bytes
) -> None:
    port.health = said
    assert await client.ask(port.address, "u1") is None


@pytest.mark.parametrize(("said", "status"), [
    (b"", 200), (b"[]", 200),
    (b'{"usage":{"completion_tokens":null}}', 200),
    (b'{"usage":{"completion_tokens":"many"}}', 200),
    (b'{"usage":{"completion_tokens":0}}', 200),
    (b'{"error":{"message":"no memory"}}', 507),
])  # fmt: skip
async def test_an_answer_without_a_token_fails_the_probe(
    port: FakeEngine, client: HealthClient, said: bytes, status: int
) -> None:
    port.completion, port.status = said, status
    assert await client.probe(port.address, "x") != ""


async def test_an_answer_larger_than_any_engines_fails_the_probe(
    port: FakeEngine, client: HealthClient
) -> None:
    port.completion = b'{"usage":{"completion_tokens":1},"x":"' + b"x" * (5 << 20) + b'"}'
    assert "the response is larger than 4 MiB" in await client.probe(port.address, "x")


async def test_an_embedding_model_is_probed_with_an_embedding(
    port: FakeEngine, client: HealthClient
) -> None:
    port.completion, port.status = b'{"error":{"message":"m","code":"not_a_text_model"}}', 400
    assert await client.probe(port.address, "x") == ""
    port.embedding = b'{"usage":{"prompt_tokens":0}}'
    assert await client.probe(port.address, "x") != ""


ANSWER = b'{"choices":[{"logprobs":{"tokens":["a","b"],"token_logprobs":[-0.5,-1.0]}}]}'


async def test_the_golden_answer_is_read(port: FakeEngine, client: HealthClient) -> None:
    port.completion = ANSWER
    assert await client.golden(port.address, "x") == (GOLDEN, "")
    # A model that only reads is asked to read.
    port.completion, port.status = b'{"error":{"message":"m","code":"not_a_text_model"}}', 400
    assert await client.golden(port.address, "x") == (None, "")


@pytest.mark.parametrize(("said", "status"), [
    (b"", 200), (b"[]", 200), (b'{"choices":[]}', 200),
    (b'{"choices":[{"logprobs":{"tokens":["a"],"token_logprobs":[null]}}]}', 200),
    (b'{"error":{"message":"no memory"}}', 507),
    (b"[]", 400),
])  # fmt: skip
async def test_an_invalid_golden_answer_is_an_error(
    port: FakeEngine, client: HealthClient, said: bytes, status: int
) -> None:
    port.completion, port.status = said, status
    answer, error = await client.golden(port.address, "x")
    assert answer is None
    assert error.startswith("the golden answer failed: ")
