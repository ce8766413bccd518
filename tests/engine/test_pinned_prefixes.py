"""Pinned prefixes: an engine reads them once, never evicts them, and finds them for every API key."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.cache.interface import BLOCK_TOKENS
from fleetctl.launch.prefix_recorder import read_prefix
from schemas.kv_cache import KvCache
from schemas.wire.engine_config import PrefixFile
from schemas.wire.headers import CACHE_SALT
from tests.support.agent_sessions import AGENTS, load_session, replay
from tests.support.engine_process import START_S, Engine, Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.ci]

SYSTEM = {"role": "system", "content": "You are a careful agent that edits files. " * 30}
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CHAT = {"messages": [SYSTEM, {"role": "user", "content": "recorded"}], "tools": [TOOL]}
RESPONSES = {
    "instructions": "You are another agent. " * 40,
    "input": [{"role": "user", "content": "recorded"}],
    "stream": True,
}
KEY_1, KEY_2 = "1" * 32, "2" * 32


def usage(engine: Engine, text: str, key: str = "") -> tuple[int, int]:
    """Return the tokens of the agent's prompt with another message, and how many were cached."""
    messages = [SYSTEM, {"role": "user", "content": text}]
    headers = {CACHE_SALT: key} if key else {}
    reply = engine.chat(headers=headers, messages=messages, tools=[TOOL], max_tokens=1)
    counts: dict[str, Any] = reply.json["usage"]
    return counts["prompt_tokens"], counts["prompt_tokens_details"]["cached_tokens"]


def prefixes(folder: Path, **bodies: object) -> tuple[PrefixFile, ...]:
    for name, body in bodies.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    return tuple(
        PrefixFile(name=name, path=folder / f"{name}.json", tokens=2048) for name in bodies
    )


def is_settled(engine: Engine) -> bool:
    return engine.is_ready() and engine.health().json["prefixes"] != "ReadingPrefixes"


def test_a_pinned_prefix_outlives_everything(start: Start, tiny: Path, tmp_path: Path) -> None:
    fields = {
        "kv_cache": KvCache(prefix_bytes="1Mi", disk_bytes="1Gi"),
        "prefix_disk_dir": tmp_path / "kv",
        "prefixes": prefixes(tmp_path, chat=CHAT, responses=RESPONSES),
    }
    first = start(tiny, **fields)
    eventually(lambda: is_settled(first), within_s=START_S)
    assert first.health().json["prefixes"] == "Pinned", first.health().json
    # The first request of any key reads its own tokens and less than a block of the prefix.
    for key in ("", KEY_1):
        tokens, cached = usage(first, "one", key)
        assert tokens - cached < BLOCK_TOKENS + 32, key
    pinned = usage(first, "one", KEY_2)[1]
    for number in range(40):
        assert first.chat(f"{number} is no number of the agent. " * 60).status == 200
    assert first.metrics()["prefix_cache_evictions_total"] > 100
    for key in ("", KEY_1, KEY_2):
        assert usage(first, "two", key)[1] >= pinned, key
    eventually(lambda: len(list((tmp_path / "kv").glob("*.kv"))) > pinned // BLOCK_TOKENS)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(START_S)
    second = start(tiny, **fields)
    eventually(lambda: is_settled(second), within_s=START_S)
    assert second.health().json["prefixes"] == "Pinned"
    assert second.metrics()["prefill_tokens_total"] < BLOCK_TOKENS
    assert usage(second, "three", KEY_2)[1] >= pinned


def test_a_recorded_agent_reads_its_own_words_only(start: Start, tmp_path: Path) -> None:
    recorded: dict[str, object] = {}
    for agent in AGENTS:
        session = load_session(agent, 1)
        headers = {name.encode(): value.encode() for name, value in session.headers.items()}
        path = session.path.partition("?")[0]
        bodies = (read_prefix(path, headers, orjson.dumps(body)) for body in session.bodies)
        recorded[agent] = next(body for body in bodies if body)
    model = tmp_path / "model"
    command = [sys.executable, "-m", "tests.support.scripted_model", str(model), "", "", "text"]
    subprocess.run(command, check=True)
    pinned = [
        prefix.model_copy(update={"tokens": 65536}) for prefix in prefixes(tmp_path, **recorded)
    ]
    engine = start(model, prefixes=tuple(pinned), context_length=200_000, concurrency=1)
    eventually(lambda: is_settled(engine), within_s=START_S)
    assert engine.health().json["prefixes"] == "Pinned", engine.health().json

    def post(path: str, body: bytes) -> tuple[Mapping[str, str], Any]:
        reply = engine.request("POST", path, body)
        assert reply.status == 200, reply.raw
        return reply.headers, reply.json

    for agent in AGENTS:
        known: list[Sequence[int]] = []
        # Another user, folder and day; then the recorded session, for what both have in common.
        live = replay(post, load_session(agent, 2), known, turns=slice(1))
        first = replay(post, load_session(agent, 1), known, turns=slice(1))
        common = first.prompts - first.new
        assert live.prompts - live.read > common - 2 * BLOCK_TOKENS, (agent, common, live)


def test_what_cannot_be_pinned_is_reported(start: Start, tiny: Path, tmp_path: Path) -> None:
    given = prefixes(
        tmp_path,
        long=CHAT,
        anthropic={"system": "You are one.", "messages": CHAT["messages"]},
        fits=CHAT,
    )
    missing = PrefixFile(name="missing", path=tmp_path / "none.json", tokens=64)
    short = given[0].model_copy(update={"tokens": 64})
    engine = start(tiny, prefixes=(short, *given[1:], missing))
    eventually(lambda: is_settled(engine), within_s=START_S)
    health = engine.health().json
    assert health["prefixes"] == "NotPinned"
    message = health["prefixesMessage"]
    assert message.startswith("1 of 4 pinned, ")
    assert "long: long.json has " in message
    assert "set its tokens to that" in message
    assert "anthropic: The file must have the list `messages`" in message
    assert "fleetctl launch AGENT --record FILE" in message
    assert f"missing: {tmp_path}/none.json cannot be read: No such file" in message
    assert engine.chat().status == 200
