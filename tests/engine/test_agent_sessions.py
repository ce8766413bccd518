"""Recorded sessions of agents on an engine with a tiny model: nothing is read twice, and each miss is explained."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.cache.interface import BLOCK_TOKENS
from schemas.kv_cache import KvCache
from tests.support.agent_sessions import ReadTokens, load_session, replay
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.ci, pytest.mark.timeout(560)]
MOST = 1.05
LONGEST_S = 300.0


def read(
    engine: Engine, agent: str, number: int, known: list[Sequence[int]], **how: Any
) -> ReadTokens:
    def post(path: str, body: bytes) -> tuple[Mapping[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=LONGEST_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == 200, answer
            return {name.lower(): value for name, value in response.getheaders()}, answer

    return replay(post, load_session(agent, number), known, **how)


def test_an_agent_reads_each_token_once(tmp_path: Path) -> None:
    agent = "opencode"
    model, cache = tmp_path / "model", tmp_path / "blas"
    cache.mkdir(mode=0o700)
    command = [sys.executable, "-m", "tests.support.tiny_model", str(model), "--endless"]
    subprocess.run([*command, "--context", "65536"], check=True, stdout=subprocess.DEVNULL)
    fields = {
        "kv_cache": KvCache(disk_bytes="4Gi"),
        "prefix_disk_dir": tmp_path / "kv",
        "context_length": 65536,
        "concurrency": 1,
    }
    known: list[Sequence[int]] = []
    with forking(tmp_path, cache) as start:
        engine = start(model, **fields)
        eventually(engine.is_ready, within_s=START_S)
        first = read(engine, agent, 1, known, turns=slice(12))
        second = read(engine, agent, 2, known, turns=slice(6))
        assert first.ratio <= MOST
        assert second.ratio <= MOST
        # The system prompt and the tools were read in the first session.
        assert second.new < 0.5 * first.new
        assert not [why for why in (*first.misses, *second.misses) if "again" in why], first.misses
        blocks = sum(map(len, known[-1:])) // BLOCK_TOKENS
        eventually(lambda: written(engine) >= blocks, within_s=60)
        engine.process.send_signal(signal.SIGTERM)
        engine.wait()
        engine = start(model, **fields)
        eventually(engine.is_ready, within_s=START_S)
        # Prompts are on the disk up to their last full block.
        later = read(engine, agent, 2, known, turns=slice(6, 12))
        assert later.read - later.new < BLOCK_TOKENS
        parts = (first, second, later)
        assert sum(part.read for part in parts) <= MOST * sum(part.new for part in parts)
        assert later.prompts > 50 * later.read
        # The same session without canonical prompts.
        plain = read(engine, agent, 2, known, turns=slice(1), is_canonical=False)
        assert "read again: system message: content differs at character" in plain.misses[0]


def written(engine: Engine) -> int:
    name = "fleet_engine_prefix_cache_disk_written_blocks_total "
    lines = engine.request("GET", "/metrics").raw.decode().splitlines()
    return int(float(next(line for line in lines if line.startswith(name)).split()[1]))
