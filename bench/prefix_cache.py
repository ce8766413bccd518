"""A long prompt after a restart: with cached prompts on disk, cold, and with mlx-lm's own file of a prompt: 3 rounds.

`python -m bench.prefix_cache` makes SmolLM2. A round asks a new engine for a prompt (cold), lets it generate while it
writes behind, kills it with -9, and asks its successor for the same prompt (warm). An engine without a disk generates
for comparison. The peer computes one prompt with mlx-lm and saves its cache (`save_prompt_cache`); in each round
another process loads it and makes a token. Loading the model is counted on neither side. All figures are medians of
seconds.

The prompt has 1,500 tokens instead of the 26,000 of a coding agent, which the CPU backend needs minutes for; what a
file spares grows with the prompt, so a longer one is no worse.

Recorded agents are replayed on a tiny model, two sessions of 20 turns each: tokens read by tokens that are new.
"""

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.engine_start import free_port, real_model, start_engine
from bench.result import SMOKE, finish, of_peer, recorded, sized
from schemas.kv_cache import KvCache
from tests.support.agent_sessions import ReadTokens, load_session, replay

ROUNDS: Final = sized(3, smoke=1)
PROMPT_TOKENS: Final = sized(1_500, smoke=256)
ANSWER_TOKENS: Final = sized(64, smoke=8)
AGENTS: Final = sized(("aider", "claude", "opencode", "qwen"), smoke=("aider",))
AGENT_TURNS: Final = sized(20, smoke=2)
_BLOCK: Final = 64
_GIVE_UP_S: Final = 200.0

_PEER: Final = """
import json, sys, time
import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

model, _ = load(sys.argv[1])
prompt, path, way = json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
model(mx.array([[1, 2, 3]]))  # compiled before the clock runs
began = time.perf_counter()
if way == "cold":
    cache = make_prompt_cache(model)
    for at in range(0, len(prompt) - 1, 512):
        model(mx.array([prompt[at : min(at + 512, len(prompt) - 1)]]), cache=cache)
        mx.eval([one.state for one in cache])
else:
    cache = load_prompt_cache(path)
mx.eval(mx.argmax(model(mx.array([prompt[-1:]]), cache=cache)[0, -1]))
took = time.perf_counter() - began
if way == "cold":
    for one in cache:
        one.trim(1)
    save_prompt_cache(path, cache)
print(took)
"""


@dataclass(frozen=True, slots=True)
class _Server:
    port: int
    process: subprocess.Popen[bytes]

    def call(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_GIVE_UP_S)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def seconds(self, prompt: Sequence[int], tokens: int) -> float:
        """Return the seconds of a whole answer."""
        fields = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        began = time.perf_counter()
        status, answer = self.call(
            "POST", "/v1/completions", json.dumps(fields | {"ignore_eos": True})
        )
        took = time.perf_counter() - began
        if status != 200:
            raise RuntimeError(f"the engine answered {status}: {answer[:300]!r}")
        return took

    def written(self) -> int:
        """Return the blocks that are on the disk."""
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            if line.startswith("fleet_engine_prefix_cache_disk_written_blocks_total "):
                return int(float(line.split()[1]))
        return 0


def _wait(holds: object, what: str) -> None:
    assert callable(holds)
    began = time.perf_counter()
    while not holds():
        if time.perf_counter() - began > _GIVE_UP_S:
            raise TimeoutError(what)
        time.sleep(0.05)


@contextmanager
def _engine(model: Path, disk: Path | None, *, context_length: int = 4096) -> Iterator[_Server]:
    port = free_port()
    fields: dict[str, object] = {"context_length": context_length, "concurrency": 2}
    if disk is not None:
        fields |= {"kv_cache": KvCache(disk_bytes="4Gi"), "prefix_disk_dir": disk}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = start_engine(model, port, fields=fields, **quiet)
    server = _Server(port, process)
    try:
        _wait(lambda: server.call("GET", "/ready")[0] == 200, "the engine did not start")
        server.seconds([1, 2, 3], 1)  # compiled before the clock runs
        yield server
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _prompt(number: int) -> list[int]:
    words = random.Random(number)
    first, last = (0, 300) if SMOKE else (1_000, 40_000)  # the smoke model's vocabulary is small
    return [words.randrange(first, last) for _ in range(PROMPT_TOKENS)]


def _round(model: Path, root: Path, number: int) -> dict[str, float]:
    prompt = _prompt(number)
    found: dict[str, float] = {}
    disk = root / f"disk-{number}"
    with _engine(model, disk) as engine:
        found["cold_s"] = engine.seconds(prompt, 1)
        found["writing_s"] = engine.seconds(prompt[:8], ANSWER_TOKENS)
        blocks = PROMPT_TOKENS // _BLOCK
        _wait(lambda: engine.written() >= blocks, "the blocks were not written")
    with _engine(model, disk) as engine:
        found["warm_s"] = engine.seconds(prompt, 1)
        found["disk_idle_s"] = engine.seconds(prompt[:8], ANSWER_TOKENS)
    with _engine(model, None) as engine:
        found["no_disk_s"] = engine.seconds(prompt[:8], ANSWER_TOKENS)
    with of_peer():
        file = root / "peer.safetensors"
        if not file.exists():  # MLX takes a minute and a half for it on a CPU
            _peer_s(model, _prompt(0), file, "cold")
        found["peer_warm_s"] = _peer_s(model, _prompt(0), file, "warm")
    return found


def _peer_s(model: Path, prompt: Sequence[int], file: Path, way: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _PEER, str(model), json.dumps(prompt), str(file), way],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    return float(done.stdout.splitlines()[-1])


def _agents(root: Path) -> dict[str, float]:
    """Return the tokens that an engine read by those that were new, for each recorded agent.

    Two sessions of an agent, the second after a restart with kill -9. The model is tiny: the figures have no time.
    """
    model = root / "tiny"
    command = [sys.executable, "-m", "tests.support.tiny_model", str(model), "--endless"]
    subprocess.run([*command, "--context", "131072"], check=True, stdout=subprocess.DEVNULL)
    figures: dict[str, float] = {}
    for agent in AGENTS:
        known: list[Sequence[int]] = []
        parts: list[ReadTokens] = []
        for number in (1, 2):
            with _engine(model, root / f"disk-{agent}", context_length=131_072) as engine:

                def post(
                    path: str, body: bytes, engine: _Server = engine
                ) -> tuple[dict[str, str], Any]:
                    status, answer = engine.call("POST", path, body.decode())
                    if status != 200:
                        raise RuntimeError(f"the engine answered {status}: {answer[:300]!r}")
                    return {}, json.loads(answer)

                session = load_session(agent, number)
                turns = slice(AGENT_TURNS)
                parts.append(replay(post, session, known, turns=turns, model="bench"))
                if number == 1:
                    blocks = len(known[-1]) // _BLOCK
                    _wait(
                        lambda e=engine, n=blocks: e.written() >= n, "the blocks were not written"
                    )
        read, new = sum(part.read for part in parts), sum(part.new for part in parts)
        figures[f"{agent}_read_of_new"] = round(read / new, 4)
        figures[f"{agent}_second_read_of_prompts"] = round(parts[1].read / parts[1].prompts, 4)
        print({name: value for name, value in figures.items() if agent in name}, flush=True)
    return figures


def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as root, recorded(failed, "mlx-lm"):
        model = real_model(Path(root))
        for number in range(ROUNDS):
            rounds.append(_round(model, Path(root), number))
            print({name: round(value, 3) for name, value in rounds[-1].items()}, flush=True)
    agents: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as root, recorded(failed, "agents"):
        agents = _agents(Path(root))
    compared: dict[str, float] = {}
    figures: dict[str, float] = {}
    if rounds:
        figures = {
            name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]
        }
        compared = {
            "warm_of_cold": round(figures["warm_s"] / figures["cold_s"], 4),
            "warm_of_peer_warm": round(figures["warm_s"] / figures["peer_warm_s"], 3),
            "decode_while_writing_of_no_disk": round(
                figures["no_disk_s"] / figures["writing_s"], 3
            ),
        }
    finish(
        "prefix_cache",
        compared,
        {"rounds": ROUNDS, "prompt_tokens": PROMPT_TOKENS, **figures, **agents},
        failed=failed,
    )


if __name__ == "__main__":
    main()
