"""Lines of the level debug about each decision of the batch, with the ID of the request."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from schemas.kv_cache import KvCache
from tests.engine.batch.conftest import NewBatch
from tests.support.engine_batches import PROMPTS, job, load_once, new_batch, run

pytestmark = pytest.mark.mlx


def lines(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.getMessage() == message]


@pytest.mark.ci
def test_memory_that_requests_wait_for_and_give_up(
    new: NewBatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = new(kv_cache=KvCache(prefix_bytes=str(1 << 20)))
    room = 4 * 256 * batch.memory.budget.footprint.token_bytes
    batch.memory.budget = dataclasses.replace(batch.memory.budget, kv_bytes=room)
    prompts = [[(5 * at * (n + 1) + n) % 480 + 10 for at in range(250)] for n in range(3)]
    jobs = [job(n, prompts[n], max_tokens=520, request_id=f"request-{n}") for n in range(3)]
    with caplog.at_level(logging.DEBUG, logger="engine"):
        run(batch, *jobs)
    (stopped,) = lines(caplog, "request gives up its memory to others")
    assert stopped["request_id"] == "request-1"
    assert stopped["promised_bytes"] <= stopped["kv_bytes"] == room
    waited = lines(caplog, "request waits for memory")
    assert {one["request_id"] for one in waited} >= {"request-1", "request-2"}
    assert len(waited) < 10  # a line for each wait, and not for each step
    begun = lines(caplog, "request begins to generate")
    assert [one["request_id"] for one in begun].count("request-1") == 2
    again = [one for one in begun if one["completion_tokens"]]
    assert [one["request_id"] for one in again] == ["request-1"]


def test_what_the_prefix_cache_had_and_lost(
    new: NewBatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = new(kv_cache=KvCache(prefix_bytes=str(1 << 18)))
    with caplog.at_level(logging.DEBUG, logger="engine"):
        for number in (1, 7, 7):
            run(batch, job(number, PROMPTS[number], request_id="r"))
        for number in range(8):
            run(batch, job(number, [at + number for at in PROMPTS[7]], request_id="r"))
    assert lines(caplog, "prefix not found")
    assert lines(caplog, "prefix found")[0]["cached_tokens"] > 100
    assert lines(caplog, "prefix blocks evicted")
    assert lines(caplog, "request begins to generate")[2]["cached_tokens"] > 100


def test_when_guesses_begin_and_end(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    batch = new_batch(load_once(tiny), tiny, ngram_tokens=4)
    proposer = batch.executor.proposer
    proposer.times.plain_s = 1.0  # as measured, so that the first repetition is worth a guess
    with caplog.at_level(logging.DEBUG, logger="engine"):
        run(batch, job(0, [20, 21, 22, 23] * 20, max_tokens=60, request_id="alone"))
        run(batch, job(1, PROMPTS[1], request_id="a"), job(2, PROMPTS[2], request_id="b"))
    assert [line["request_id"] for line in lines(caplog, "guesses begin")][:1] == ["alone"]
    assert lines(caplog, "guesses end")[0]["draft_tokens"] >= 0
