"""Each family of models in a real engine: alone, in a batch, in a second turn, and from files after kill -9."""

import contextlib
import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.cache.interface import BLOCK_TOKENS
from schemas.kv_cache import KvCache
from tests.support.engine_process import START_S, Engine, Start, eventually
from tests.support.mlx_models import Late
from tests.support.model_families import save, save_draft

pytestmark = [pytest.mark.mlx, pytest.mark.ci, pytest.mark.timeout(300)]
mx: Any = Late("mlx.core")
mlx_lm: Any = Late("mlx_lm")
cache: Any = Late("mlx_lm.models.cache")

PROMPT, TURN, ANSWER = 700, 40, 12
"""Tokens. A prompt is longer than each window of these configs, and than one piece of reading."""
NAMES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "gpt_oss",
    "olmo3",
    "cohere2",
    "gemma3_text",
    "gemma4_text",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "mamba2",
    "nemotron_h",
    "jamba",
    "lfm2",
)


class Plain:
    """The same folder in plain mlx-lm."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = mlx_lm.load(str(folder))
        self.tokens: list[int] = []
        """Those of the last answer."""

    def answer(self, prompt: list[int]) -> Any:
        """Return about the log probabilities of a greedy answer without end tokens, the prompt read at once and alone."""
        caches = cache.make_prompt_cache(self.model)
        scores: list[float] = []
        ends = mx.array(sorted(self.tokenizer.eos_token_ids))
        self.tokens, piece = [], prompt
        for _ in range(ANSWER):
            logits = self.model(mx.array([piece]), cache=caches)[0, -1].astype(mx.float32)
            scored = logits - mx.logsumexp(logits)
            scored[ends] = -mx.inf
            piece = [int(mx.argmax(scored).item())]
            scores.append(float(scored[piece[0]].item()))
            self.tokens += piece
        return pytest.approx(scores, abs=2e-3)


def ask(engine: Engine, prompt: list[int]) -> tuple[list[float], int]:
    """Return the log probabilities of a greedy answer, and the number of cached tokens of its prompt."""
    fields: dict[str, Any] = {
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    reply = engine.post("/v1/completions", prompt=prompt, **fields)
    assert reply.status == 200, reply.raw
    details = reply.json["usage"].get("prompt_tokens_details") or {}
    scores = reply.json["choices"][0]["logprobs"]["token_logprobs"]
    return scores, int(details.get("cached_tokens") or 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_answers_as_plain_mlx_lm(start: Start, tmp_path: Path, name: str) -> None:
    folder, files = tmp_path / "model", tmp_path / "kv"
    save(folder, name)
    fields = {"kv_cache": KvCache(disk_bytes="1Gi"), "prefix_disk_dir": files, "concurrency": 4}
    engine = start(folder, **fields)
    plain = Plain(folder)
    dice = random.Random(5)
    first, *others = (dice.choices(range(4, 260), k=PROMPT - 90 * n) for n in range(4))
    eventually(engine.is_ready, within_s=START_S)

    wanted = plain.answer(first)
    assert ask(engine, first)[0] == wanted, "alone"
    gate = threading.Barrier(len(others))

    def together(prompt: list[int]) -> list[float]:
        gate.wait(START_S)
        return ask(engine, prompt)[0]

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(together, others))
    assert answers == [plain.answer(prompt) for prompt in others], "in a batch"

    turn = [*first, *dice.choices(range(4, 260), k=TURN)]
    wanted = plain.answer(turn)
    scores, cached = ask(engine, turn)
    assert cached >= PROMPT - 1, "second turn"
    assert scores == wanted, "second turn"

    wait_for_files(files)
    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait(START_S)
    engine = start(folder, **fields)
    eventually(engine.is_ready, within_s=START_S)
    scores, cached = ask(engine, [*turn, 7, 8, 9])
    assert cached >= len(turn) - BLOCK_TOKENS, "after kill -9"
    assert scores == plain.answer([*turn, 7, 8, 9]), "from files"

    system = {"role": "system", "content": "".join(map(chr, dice.choices(range(97, 123), k=400)))}
    shared = []
    for question in ("Why is that?", "How do I start?"):
        messages = [system, {"role": "user", "content": question}]
        reply = engine.post("/v1/chat/completions", messages=messages, max_tokens=2)
        assert reply.status == 200, reply.raw
        shared.append((reply.json["usage"].get("prompt_tokens_details") or {})["cached_tokens"])
    assert shared[0] < BLOCK_TOKENS <= 200 <= shared[1], "another chat with the same system message"


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "kimi_linear", "nemotron_h", "mamba2", "lfm2", "gemma3_text", "gpt_oss"]
)  # fmt: skip
def test_guesses_of_a_draft_change_no_answer(start: Start, tmp_path: Path, name: str) -> None:
    folder, draft = tmp_path / "model", tmp_path / "draft"
    save(folder, name, tie_word_embeddings=False)
    save_draft(draft, folder)
    engine = start(folder, draft_model=draft, draft_tokens=3, concurrency=4)
    plain = Plain(folder)
    dice = random.Random(5)
    first, *others = (dice.choices(range(4, 260), k=PROMPT - 90 * n) for n in range(4))
    eventually(engine.is_ready, within_s=START_S)
    wanted = plain.answer(first)
    turn = [*first, *plain.tokens, *dice.choices(range(4, 260), k=TURN)]
    assert ask(engine, first)[0] == wanted, "alone"
    assert engine.metrics()["draft_accepted_tokens_total"] > 0

    gate = threading.Barrier(len(others))

    def together(prompt: list[int]) -> list[float]:
        gate.wait(START_S)
        return ask(engine, prompt)[0]

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(together, others))
    assert answers == [plain.answer(prompt) for prompt in others], "in a batch"

    body = {"model": "tiny", "prompt": others[0], "max_tokens": 900, "ignore_eos": True}
    with contextlib.closing(engine.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
        lines = connection.getresponse()
        for _ in range(40):
            lines.readline()
    eventually(lambda: engine.busy() == (0, 0), what="the cancelled request")

    scores, cached = ask(engine, turn)
    assert cached >= PROMPT + ANSWER - 1, "second turn"
    assert scores == plain.answer(turn), "second turn"
    guessed = engine.metrics()
    assert guessed["draft_accepted_tokens_total"] < guessed["draft_tokens_total"]


def wait_for_files(folder: Path) -> None:
    """Wait until files came, and no other came for half a second."""
    counts = [0]

    def is_quiet() -> bool:
        time.sleep(0.5)
        counts.append(len(list(folder.glob("*.kv"))))
        return counts[-1] == counts[-2] > 0

    eventually(is_quiet, what="the prompt on disk")
