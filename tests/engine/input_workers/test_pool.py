"""Input workers: real processes that tokenize, render templates and compile schemas, and what ends them."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.input_workers.pool import InputWorkers
from engine.openai import prompt_encoder
from engine.openai.input_tasks import GrammarTask, Lane
from engine.text.codec import TextCodec
from schemas.wire.errors import Refusal, RefusedError
from tests.support.engine_requests import chat, complete
from tests.support.input_workers import is_lost, pid_of, running, tokens
from tests.support.text_codecs import TEXT, byte_level, load
from tests.support.waiting import until

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
BODY = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools|tojson if tools }}"
)
LOOP = "{% for x in range(99999) %}" * 3 + "{% endfor %}" * 3
# Templates that pass the check with one short message.
LATER = "{% if messages|length > 1 %}BOMB{% endif %}" + BODY
TURN = {"role": "user", "content": TEXT}
TOOL = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}
PAIR = chat(messages=[TURN, TURN])


def codec_of(folder: Path, bomb: str = "") -> TextCodec:
    return load(folder, byte_level(), chat_template=LATER.replace("BOMB", bomb))


async def refused(workers: InputWorkers, lane: Lane | None = None) -> Refusal:
    """Return the refusal of two messages."""
    with pytest.raises(RefusedError) as caught:
        await tokens(workers, PAIR, lane)
    return caught.value.refusal


@pytest.mark.ci
async def test_workers_write_the_prompts_that_the_serving_process_would(
    tmp_path: Path, blas_cache: Path
) -> None:
    codec = codec_of(tmp_path)
    requests = [
        chat(messages=[TURN]),
        chat(
            messages=[
                TURN | {"name": "Bob"},
                {"role": "assistant", "content": None, "refusal": "no"},
                TURN,
            ]
        ),
        chat(messages=[TURN], tools=[TOOL]),
        chat(messages=[TURN], chat_template_kwargs={"enable_thinking": False}),
        complete(prompt=TEXT),
        complete(prompt="x " * 40_000),
    ]
    async with running(codec, blas_cache) as workers:
        for request in requests:
            (expected,) = prompt_encoder.encode_prompts(request, codec)
            assert await tokens(workers, request) == tuple(expected)


@pytest.mark.ci
async def test_a_template_that_takes_too_long_is_ended_and_the_next_request_works(
    tmp_path: Path,
    blas_cache: Path,
) -> None:
    async with running(codec_of(tmp_path, LOOP), blas_cache, limit_s=0.3) as workers:
        before = await tokens(workers, chat(messages=[TURN]))
        refusal = await refused(workers)
        assert (refusal.status, refusal.code) == (400, "input_too_costly")
        assert "more than 0.3 s" in refusal.message
        assert await tokens(workers, chat(messages=[TURN])) == before


@pytest.mark.ci
@pytest.mark.parametrize(
    ("bomb", "complaint"),
    [
        pytest.param("{{ 'x' * 10**15 }}", "too much memory", id="multiplies"),
        pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe", id="escapes"),
        pytest.param("{{ messages.append(1) }}", "unsafe", id="changes-the-messages"),
        pytest.param("{% include '/etc/passwd' %}", "no loader", id="reads-a-file"),
        pytest.param("{{ ('x' * 2**29)|length }}", "memory", id="takes-half-a-gigabyte"),
    ],
)
async def test_a_template_that_is_hostile_for_some_messages_only(
    tmp_path: Path, blas_cache: Path, bomb: str, complaint: str
) -> None:
    codec = codec_of(tmp_path, bomb)
    assert codec.template_complaint() == ""
    async with running(codec, blas_cache) as workers:
        refusal = await refused(workers)
        assert refusal.status == 400
        assert complaint in refusal.message
        assert await tokens(workers, chat(messages=[TURN]))


@pytest.mark.ci
async def test_a_worker_that_is_killed_costs_one_request(tmp_path: Path, blas_cache: Path) -> None:
    async with running(codec_of(tmp_path, LOOP), blas_cache) as workers:
        await tokens(workers, chat(messages=[TURN]))
        pid = pid_of(workers, Lane.SHORT)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(refused(workers))
            await until_busy(pid)
            os.kill(pid, signal.SIGKILL)
        refusal = waiting.result()
        assert (refusal.status, refusal.code, refusal.retry_after_s) == (
            503,
            "input_worker_lost",
            1,
        )
        assert "signal 9" in refusal.message
        assert await tokens(workers, chat(messages=[TURN]))
        pid = pid_of(workers, Lane.SHORT)
        os.kill(pid, signal.SIGKILL)  # idle: no request notices
        await until(lambda: is_lost(workers, Lane.SHORT, pid))
        assert await tokens(workers, chat(messages=[TURN]))


@pytest.mark.ci
async def test_a_worker_that_hangs_is_replaced(tmp_path: Path, blas_cache: Path) -> None:
    async with running(codec_of(tmp_path), blas_cache, limit_s=0.5) as workers:
        await tokens(workers, chat(messages=[TURN]))
        os.kill(pid_of(workers, Lane.SHORT), signal.SIGSTOP)
        assert (await refused(workers)).code == "input_too_costly"
        assert await tokens(workers, chat(messages=[TURN]))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
async def test_no_library_of_workers_starts_threads_before_the_fork(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    async with running(codec_of(tmp_path), cache) as workers:
        await tokens(workers, chat(messages=[TURN]))
        pid = pid_of(workers, Lane.SHORT)
        server = psutil.Process(pid).parent()
        assert server is not None
        assert server.num_threads() == 1
        assert server.environ()["VECLIB_MAXIMUM_THREADS"] == "1"
    assert list(cache.glob("transformers-*.imports")), "the import cache is not used"


@pytest.mark.ci
async def test_another_fork_server_replaces_one_that_is_killed(
    tmp_path: Path, blas_cache: Path
) -> None:
    async with running(codec_of(tmp_path, LOOP), blas_cache) as workers:
        await tokens(workers, chat(messages=[TURN]))
        pid = pid_of(workers, Lane.SHORT)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(refused(workers))
            await until_busy(pid)
            os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
        assert waiting.result().code == "input_worker_lost"
        await until_gone(pid)  # it was busy, and nobody waits for it
        assert await tokens(workers, chat(messages=[TURN]))


@pytest.mark.ci
async def test_costly_input_delays_no_short_prompt_and_a_client_that_leaves_ends_it(
    tmp_path: Path,
    blas_cache: Path,
) -> None:
    async with running(codec_of(tmp_path, LOOP), blas_cache, limit_s=100) as workers:
        await tokens(workers, chat(messages=[TURN]), Lane.HUGE)
        pid = pid_of(workers, Lane.HUGE)
        async with asyncio.TaskGroup() as group:
            costly = group.create_task(refused(workers, Lane.HUGE))
            await until_busy(pid)
            assert workers.is_busy
            assert await tokens(workers, chat(messages=[TURN]))
            costly.cancel()
        await until_gone(pid)
        assert await tokens(workers, chat(messages=[TURN]), Lane.HUGE)
        assert not workers.is_busy


@pytest.mark.ci
async def test_a_client_that_leaves_the_queue_begins_nothing(
    tmp_path: Path, blas_cache: Path
) -> None:
    async with running(codec_of(tmp_path), blas_cache) as workers:
        await tokens(workers, chat(messages=[TURN]))
        asked: Any = workers._lanes[Lane.SHORT].worker
        async with asyncio.TaskGroup() as group:
            first = group.create_task(tokens(workers, chat(messages=[TURN])))
            second = group.create_task(tokens(workers, chat(messages=[TURN])))
            await asyncio.sleep(0)
            second.cancel()
        assert first.result()
        assert asked.connection.asked == 2


def form(count: int) -> GrammarTask:
    """Return the task of a schema in which so many patterns of names meet."""
    letters = "|".join(f"[{chr(0x400 + 7 * n)}-{chr(0x430 + 7 * n)}]x" for n in range(300))
    parts: list[Any] = [{"patternProperties": {f"^({letters})*{at}$": {}}} for at in range(count)]
    fields = {"name": "x", "schema": {"type": "object", "allOf": parts}}
    asked = chat(messages=[TURN], response_format={"type": "json_schema", "json_schema": fields})
    return GrammarTask(request=asked, tail=())


@pytest.mark.ci
async def test_a_schema_that_takes_too_long_is_refused_and_others_compile(
    tmp_path: Path, blas_cache: Path
) -> None:
    async with running(codec_of(tmp_path), blas_cache, limit_s=0.2) as workers:
        (small,) = await workers.prepare(Lane.GRAMMAR, form(1), size=0)
        assert small.grammar
        with pytest.raises(RefusedError) as caught:
            await workers.prepare(Lane.GRAMMAR, form(16), size=0)
        assert caught.value.refusal.code == "input_too_costly"
        assert await workers.prepare(Lane.GRAMMAR, form(1), size=0) == (small,)


async def until_busy(pid: int) -> None:
    """Wait until a process has worked for a moment."""
    process = psutil.Process(pid)
    start = process.cpu_times().user
    await until(lambda: process.cpu_times().user > start + 0.05)


async def until_gone(pid: int) -> None:
    """Wait until a process has ended, or waits to be reaped."""
    await until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )
