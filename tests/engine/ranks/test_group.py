"""Several processes as one engine: each has its part, all execute the same plans, and all end together."""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.errors import StoppedError
from engine.ranks import rendezvous
from engine.ranks.messages import JoinMessage
from machinery.clock import SystemClock
from schemas.kv_cache import KvCache
from tests.engine.ranks.conftest import Make
from tests.support.engine_groups import SECRET, Meeting, end, form, lose, streaming
from tests.support.engine_process import Engine, Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]
# Three ranks can share this one's heads, and two could not.
NINE_HEADS = ("--arch=llama", "--hidden=144", "--heads=9", "--kv-heads=3")
FOUR_LAYERS = ("--arch=qwen2", "--layers=4")
PROMPTS = ("tell me", "of the people, by the people, for the people " * 30)


def answers(engine: Engine) -> list[tuple[str, list[float]]]:
    """Return greedy answers: text and log probabilities."""
    found = [engine.chat(text, max_tokens=20, logprobs=True).json["choices"][0] for text in PROMPTS]
    return [
        (one["message"]["content"], [each["logprob"] for each in one["logprobs"]["content"]])
        for one in found
    ]


def alone(fork: Start, model: Path) -> list[Any]:
    """Return the answers of one process; sums in another order may differ slightly."""
    engine = fork(model)
    eventually(engine.is_ready, within_s=120)
    try:
        return [(text, pytest.approx(numbers, abs=1e-3)) for text, numbers in answers(engine)]
    finally:
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait(120) == 0


def steps(ranks: Sequence[Engine]) -> set[int]:
    return {rank.health().json["steps"] for rank in ranks}


@pytest.fixture(scope="module")
def pair(
    fork: Start, make: Make, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Engine]]:
    """Return a group that the tests share; it ends when it is asked to."""
    ranks = form(fork, make(), tmp_path_factory.mktemp("pair"), 2, epoch=7)
    yield ranks
    assert end(ranks) == [0, 0]


def test_two_ranks_answer_as_one_process(fork: Start, make: Make, pair: list[Engine]) -> None:
    assert answers(pair[0]) == alone(fork, make())
    loaded = [rank.health().json["loadedBytes"] for rank in pair]
    # Embedding and head are whole on both; the layers are halved.
    assert loaded[0] == loaded[1] < 0.8 * (make() / "model.safetensors").stat().st_size


def test_eight_streams_at_once(pair: list[Engine]) -> None:
    with ExitStack() as stack:
        streams = [
            stack.enter_context(
                closing(pair[0].begin(stream=True, max_tokens=20, seed=n, temperature=n % 2))
            )
            for n in range(8)
        ]
        for stream in streams:
            assert b"[DONE]" in stream.getresponse().read()
    eventually(lambda: len(steps(pair)) == 1)
    assert min(steps(pair)) > 20


def test_a_request_whose_client_is_gone_leaves_all_ranks(pair: list[Engine]) -> None:
    with streaming(pair[0]):
        pass
    eventually(lambda: pair[0].busy() == (0, 0))
    eventually(lambda: len(steps(pair)) == 1)
    assert pair[0].chat().status == 200


@pytest.mark.ci
def test_every_rank_follows_a_grammar(pair: list[Engine]) -> None:
    """Ranks above 0 get it with the step, and compile it themselves; forty need more room than their cache has."""
    for at in range(40):
        reply = pair[0].chat(guided_regex=f"x{at}[ab]{{2}}")
        found = reply.json["choices"][0]["message"]["content"]
        assert found[:-2] == f"x{at}"
        assert set(found[-2:]) <= {"a", "b"}
    assert all(engine.is_ready() for engine in pair)


def test_each_rank_reports_its_rank(pair: list[Engine]) -> None:
    assert pair[0].chat("hello").status == 200
    for number, rank in enumerate(pair):
        body = rank.health().json
        assert (body["state"], body["rank"], body["epoch"]) == ("Ready", number, 7)
        assert body["slowest_s"] > 0
    eventually(lambda: not any(rank.health().json["busy"] for rank in pair))
    refused = pair[1].chat("hello")
    assert (refused.status, refused.error["code"]) == (503, "not_rank_0")


def test_an_idle_group_does_not_spin(pair: list[Engine]) -> None:
    processes = [psutil.Process(rank.process.pid) for rank in pair]
    before = [process.cpu_times().user for process in processes]
    psutil.cpu_percent(1.0)
    assert all(one.cpu_times().user - was < 0.5 for one, was in zip(processes, before, strict=True))


@pytest.mark.ci
def test_jobs_give_up_their_memory_on_all_ranks(fork: Start, make: Make, tmp_path: Path) -> None:
    """The prefix cache takes what the proof leaves, so that requests get the memory of `kvCache.tokens` and no more."""
    room = {"context_length": 1024, "kv_cache": KvCache(tokens=1536, prefix_bytes="1Ti")}
    ranks = form(fork, make(), tmp_path, 2, room)
    fields: dict[str, Any] = {"prompt": [*range(20, 270)], "max_tokens": 520}
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "min_tokens": 520},
        {"temperature": 1, "min_tokens": 520, "seed": 3, "repetition_penalty": 1.2},
        {"temperature": 0, "guided_regex": "([a-z]|[0-9]){900}"},
    ]
    alone_ = [ranks[0].post("/v1/completions", **fields | one) for one in asked]
    assert [reply.status for reply in alone_] == [200] * 3, [reply.raw for reply in alone_]
    wanted = [reply.json["choices"] for reply in alone_]
    assert ranks[0].metrics()["preemptions_total"] == 0
    with ThreadPoolExecutor(len(asked)) as pool:
        ask = partial(ranks[0].post, "/v1/completions")
        replies = list(pool.map(lambda one: ask(**fields | one), asked))
    assert [reply.json["choices"] for reply in replies] == wanted
    assert ranks[0].metrics()["preemptions_total"] > 0
    assert end(ranks) == [0, 0]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("flags", "size"),
    [
        pytest.param((), 4, id="four ranks", marks=pytest.mark.ci),
        pytest.param(NINE_HEADS, 3, id="nine heads"),
    ],
)
def test_tensor(fork: Start, make: Make, tmp_path: Path, flags: tuple[str, ...], size: int) -> None:
    ranks = form(fork, make(*flags), tmp_path, size)
    assert answers(ranks[0]) == alone(fork, make(*flags))
    assert end(ranks) == [0] * size


@pytest.mark.ci
def test_pipeline_with_an_uneven_split(fork: Start, make: Make, tmp_path: Path) -> None:
    model = make(*FOUR_LAYERS)
    ranks = form(fork, model, tmp_path, 2, parallelism="Pipeline", layers=(3, 1))
    first, second = (rank.health().json["loadedBytes"] for rank in ranks)
    assert first > second
    assert answers(ranks[0]) == alone(fork, model)
    # What stages cached is the same, though they need different room for it.
    again = ranks[0].chat(PROMPTS[1], max_tokens=5).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    assert [rank.health().json["cachedBlocks"] for rank in ranks] == [
        ranks[0].health().json["cachedBlocks"]
    ] * 2
    assert end(ranks) == [0, 0]


def test_a_model_that_cannot_be_split_is_refused(fork: Start, make: Make, tmp_path: Path) -> None:
    meeting = Meeting.of(2, tmp_path)
    ranks = [meeting.rank(fork, make(*NINE_HEADS), number) for number in range(2)]
    # Whoever finds out first takes the other with it.
    assert {rank.wait(120) for rank in ranks} <= {2, 4}
    assert any("heads of layer 0 is" in rank.last_words() for rank in ranks)


@pytest.mark.parametrize("victim", [0, *(pytest.param(n, marks=pytest.mark.ci) for n in (1, 2))])
def test_all_ranks_end_when_one_is_killed(
    fork: Start, make: Make, tmp_path: Path, victim: int
) -> None:
    ranks = form(fork, make(*NINE_HEADS), tmp_path, 3)
    lost = f"engine: rank {victim} was lost: its connection closed without a reason"
    assert lose(ranks, victim) == [(4, lost)] * 2


@pytest.mark.ci
def test_a_frozen_rank_stops_the_progress_of_all(fork: Start, make: Make, tmp_path: Path) -> None:
    ranks = form(fork, make(), tmp_path, 2)
    with streaming(ranks[0]):
        os.kill(ranks[1].process.pid, signal.SIGSTOP)

        def stands_still() -> bool:
            before = ranks[0].health().json
            psutil.cpu_percent(0.5)
            after = ranks[0].health().json
            assert before["busy"]
            assert after["busy"]
            return bool(before["progress"] == after["progress"])

        eventually(stands_still)
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        assert ranks[0].wait(120) == 4


def test_an_incomplete_group_waits_and_can_be_stopped(
    fork: Start, make: Make, tmp_path: Path
) -> None:
    rank = Meeting.of(2, tmp_path).rank(fork, make(), 0)
    eventually(rank.answers, within_s=120)
    body = rank.health().json
    assert (body["state"], body["busy"]) == ("Joining", False)
    refused = rank.chat()
    assert (refused.status, refused.error["code"]) == (503, "loading")
    rank.process.send_signal(signal.SIGTERM)
    assert rank.wait() == 0


def test_a_rank_of_an_older_epoch_is_rejected(fork: Start, make: Make, tmp_path: Path) -> None:
    meeting = Meeting.of(2, tmp_path)
    own, over = JoinMessage(rank=0, world_size=2, epoch=3, secret=SECRET), threading.Event()

    def gather() -> None:
        with (
            socket.create_server(("127.0.0.1", meeting.port)) as listener,
            pytest.raises(StoppedError),
        ):
            rendezvous.accept_ranks(listener, own, SystemClock(), over.is_set, 120)

    thread = threading.Thread(target=gather)
    thread.start()
    rank = meeting.rank(fork, make(), 1, epoch=2)
    assert rank.wait(120) == 4
    over.set()
    thread.join()
    assert "it is of epoch 2, and the group is in epoch 3" in rank.last_words()
