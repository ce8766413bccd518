"""The verb `fleetctl chat` at a pseudo-terminal and in pipes, through real gateways."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.fleetctl.conftest import Golden
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.gateway_calls import put_api_key
from tests.support.gateway_engine_scripts import DONE, delta, dies_mid_stream, refuses
from tests.support.gateway_fake_engine import Call, FakeEngine, Script, running
from tests.support.gateway_world import World, running_gateway
from tests.support.terminal import CTRL_C, CTRL_D, ENTER, TAB, UP, terminal
from tests.support.waiting import until


def event(**choice: object) -> bytes:
    shown = {"choices": [{"index": 0, "finish_reason": None, **choice}]}
    return b"data: " + orjson.dumps(shown) + b"\n\n"


USAGE = orjson.dumps(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 3,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)


async def echoes(call: Call) -> None:
    """Answer with the last question, and the number of messages."""
    body = orjson.loads(call.body)
    asked = body["messages"][-1]["content"]
    await call.begin_stream()
    if asked == "think":
        await call.chunk(event(delta={"reasoning_content": "hm, let me see\n"}))
    for text in (asked.upper(), f" ({len(body['messages'])})"):
        await call.chunk(delta(text))
    finish = "length" if asked == "long" else "stop"
    await call.chunk(event(delta={}, finish_reason=finish))
    await call.chunk(b"data: " + USAGE + b"\n\n")
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


async def never_ends(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("once upon a time"))
    await asyncio.Event().wait()


@asynccontextmanager
async def talking(script: Script = echoes) -> AsyncIterator[tuple[str, FakeEngine]]:
    """Run a gateway with the models `qwen` and `smol`; yield its address."""
    transport = MemoryTransport(SystemClock())
    async with (
        running(FakeEngine("qwen-0", script)) as engine,
        running(FakeEngine("smol-0", script)) as other,
        running_gateway(transport) as gateway,
    ):
        world = World(transport)
        await world.serve("qwen", engine)
        await world.serve("smol", other)
        await gateway.knows("qwen", ready=1)
        await gateway.knows("smol", ready=1)
        yield gateway.url, engine


async def test_a_pipe_gets_only_the_answer(golden: Golden) -> None:
    async with talking() as (url, engine):
        await golden("worlds/chat", URL=url)
        # An argument that is not UTF-8, as Python passes it.
        typed = await run_fleetctl("chat", "qwen", "-m", "caf\udce9", "--gateway", url)
        assert (typed.code, typed.err) == (0, "")
        assert orjson.loads(engine.calls[-1].body)["messages"][-1]["content"] == "caf\ufffd"
        words = (
            "-m",
            "think",
            "--system",
            "Be brief.",
            "--temperature",
            "0.5",
            "--max-tokens",
            "9",
        )
        asked = await run_fleetctl("chat", "qwen", *words, "--stats", "--gateway", f"{url}/")
        assert (asked.code, asked.out) == (0, "THINK (2)\n")
        assert asked.err.startswith(
            "12 prompt tokens (4 cached), 3 output tokens, first text after "
        )
        assert asked.err.endswith(", qwen-0 on mac-1\n")
        body = orjson.loads(engine.calls[-1].body)
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["max_tokens"]) == (0.5, 9)


async def test_errors_are_shown() -> None:
    async with talking(dies_mid_stream) as (url, engine):
        broken = await run_fleetctl("chat", "qwen", "-m", "hi", "--gateway", url)
        assert (broken.code, broken.out) == (1, "onetwo\n")
        assert broken.err.startswith("error: ")
        engine.script = refuses(400, "context_length_exceeded")
        refused = await run_fleetctl("chat", "qwen", "-m", "hi", "--gateway", url)
        assert (refused.code, refused.out, refused.err) == (
            1,
            "",
            "error: context_length_exceeded\n",
        )


async def test_a_gateway_that_requires_api_keys(tmp_path: Path) -> None:
    world = World(MemoryTransport(SystemClock()))
    limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True)
    async with (
        running(FakeEngine("qwen-0", echoes)) as engine,
        running_gateway(world.transport, limits) as gateway,
    ):
        await world.serve("qwen", engine)
        await put_api_key(world, "sk-fleet-abc")
        await gateway.knows("qwen", ready=1)
        await until(lambda: gateway.gateway.fleet_state.keyring.is_known, what="the keys")
        words = ("chat", "qwen", "-m", "hi", "--gateway", gateway.url)
        refused = await run_fleetctl(*words)
        assert refused.code == 1
        assert refused.err.endswith(
            ". Set FLEET_API_KEY, or give the key's file with --api-key-file\n"
        )
        key = tmp_path / "key"
        key.touch(mode=0o600)
        key.write_text("sk-fleet-abc\n")
        done = await run_fleetctl(*words, "--api-key-file", str(key))
        assert (done.code, done.out) == (0, "HI (1)\n")


async def test_a_silent_gateway_times_out(tmp_path: Path) -> None:
    async with talking(never_ends) as (url, _):
        words = ("chat", "qwen", "-m", "hi", "--timeout", "200ms", "--gateway", url)
        done = await run_fleetctl(*words)
        assert (done.code, done.out) == (1, "once upon a time\n")
        assert done.err.startswith(f"error: the gateway at {url} sent nothing for 0.2 s")
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("two lines\n")
    odd = await run_fleetctl(*words, "--api-key-file", str(key))
    key.chmod(0o644)
    readable = await run_fleetctl(*words, "--api-key-file", str(key))
    assert f"Run `chmod 600 {key}`" in readable.err
    assert odd.err.startswith(f"error: {key} does not contain an API key")


@pytest.mark.timeout(180)
async def test_a_conversation(tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    async with talking() as (url, engine):
        words = ("chat", "qwen", "--gateway", url, "--history", str(history))
        async with terminal(*words, environ={"NO_COLOR": "1"}) as shown:
            await shown.until(f"qwen at {url}; /help lists commands")
            for typed, answer in (
                ("hello", "HELLO (1)"),
                ("again", "AGAIN (3)"),
                ("/system Be brief.", "the system prompt is set"),
                ("//slash", "/SLASH (6)"),
                ("/reset", "all messages are forgotten"),
                ("think", "hm, let me see\r\nTHINK (2)"),
                ("/stats", "all 4 answers: 48 prompt tokens, 12 output tokens"),
                ("/rest", "/rest is not a command; did you mean /reset?"),
                ("/model qwne", "no model is named qwne; did you mean qwen?"),
                ("/model", "* qwen\r\n  smol"),
                (f"/model s{TAB}", "/model smol"),
                ('"""one\rtwo"""', "ONE\r\nTWO (4)"),
            ):
                await shown.until("> ")
                shown.type(typed + ENTER)
                await shown.until(answer)
            await shown.until("smol> ")
            # Go back in the history: two fenced lines, the choice of smol, and the line before.
            shown.type(UP * 4 + ENTER)
            await shown.until("* smol")
            # Before the prompt appears, the terminal itself would handle Ctrl-D.
            await shown.until("smol> ")
            shown.type(CTRL_D)
            assert await shown.ended() == 0
        session = {orjson.loads(call.body)["session_id"] for call in engine.calls}
    assert len(session) == 2  # a reset starts a new session
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "hello" in history.read_text()


@pytest.mark.timeout(180)
async def test_ctrl_c_stops_the_answer_and_not_the_conversation() -> None:
    async with talking(never_ends) as (url, engine):
        words = ("chat", "qwen", "--gateway", url, "--no-history")
        async with terminal(*words) as shown:
            await shown.until("qwen> ")
            shown.type("tell me" + ENTER)
            await shown.until("once upon a time")
            shown.type(CTRL_C)
            await shown.until("stopped")
            engine.script = echoes
            await shown.until("qwen> ")
            shown.type("go on" + ENTER)
            # The interrupted answer is part of the conversation.
            await shown.until("GO ON (3)")
            await shown.until("qwen> ")
            await shown.interrupt_prompt("Ctrl-D or /quit ends the conversation")
            await shown.until("qwen> ")
            shown.type("/quit" + ENTER)
            assert await shown.ended() == 0
        await until(lambda: engine.abandoned, limit_s=60, what="the engine noticing")
        assert engine.abandoned == 1


@pytest.mark.ci
@pytest.mark.timeout(180)
async def test_at_a_terminal_a_model_is_chosen_from_a_list() -> None:
    async with talking() as (url, _), terminal("chat", "--gateway", url, "--no-history") as shown:
        await shown.until("  1  qwen\r\n  2  smol\r\nmodel: ")
        shown.type("3" + ENTER)
        await shown.until("write a number from 1 to 2, or a name")
        await shown.until("model: ")
        shown.type("2" + ENTER)
        await shown.until("smol> ")
        shown.type(CTRL_D)
        assert await shown.ended() == 0


@pytest.mark.ci
@pytest.mark.timeout(180)
async def test_a_model_cannot_write_to_the_terminal() -> None:
    async def hostile(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(delta("\x1b]0;owned\x07\x9b2J ok"))
        await call.chunk(DONE)
        await call.send(b"0\r\n\r\n")

    async with talking(hostile) as (url, _):
        words = ("chat", "qwen", "-m", "hi", "--gateway", url)
        async with terminal(*words) as shown:
            assert "␛]0;owned␇\N{REPLACEMENT CHARACTER}2J ok" in await shown.until(" ok")
            assert await shown.ended() == 0
        # In a pipe the text is unchanged.
        assert (await run_fleetctl(*words)).out == "\x1b]0;owned\x07\x9b2J ok\n"
