"""Conversations in each family of hybrid and window models, with restarts between: cached, and unchanged."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from engine.cache.block_files import BlockFiles
from tests.support.mlx_models import Late
from tests.support.model_geometries import BASE, FAMILIES, build

pytestmark = pytest.mark.mlx
mx: Any = Late("mlx.core")
prefix_cache: Any = Late("engine.cache.prefix_cache")
disk_blocks: Any = Late("engine.cache.disk_blocks")
layer_caches: Any = Late("engine.cache.layer_caches")
interface: Any = Late("engine.cache.interface")

TURNS = 30
SYSTEM, MESSAGE, ANSWER, PIECE = 1_000, 14, 6, 512
BEGINNING = 600
WAIT_S = 30.0
QWEN3_5 = {"text_config": {**BASE, **FAMILIES["qwen3_next"], "model_type": "qwen3_5_text"}}
MODELS = {
    **{
        name: FAMILIES[name]
        for name in (
            "qwen3_next",
            "gemma3_text",
            "gemma4_text",
            "gpt_oss",
            "kimi_linear",
            "nemotron_h",
            "lfm2",
        )
    },
    "qwen3_5": QWEN3_5,
}


class Conversation:
    """A model that answers greedily, with the prefix cache of one engine after another."""

    def __init__(self, name: str, folder: Path) -> None:
        mx.random.seed(7)
        self.folder = folder
        self.model = build({**BASE, **MODELS[name], "model_type": name})
        mx.eval(self.model.parameters())
        self.start()

    def make(self) -> Any:
        return layer_caches.make_caches(self.model, interface.KvOptions())

    def start(self) -> None:
        """Begin with an empty memory and the files of the engine before."""
        self.files = BlockFiles(self.folder, limit_bytes=1 << 30)
        disk = disk_blocks.BlockDisk(files=self.files, model="m")
        self.cache = prefix_cache.BlockPrefixCache(self.make, limit_bytes=1 << 30, disk=disk)

    def read(self, caches: Any, tokens: list[int]) -> Any:
        logits = self.model(mx.array([tokens]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        return logits

    def answer(self, caches: Any, last: int) -> list[int]:
        """Generate greedily after `last`; the caches have read all but the last token then."""
        tokens = [last]
        for _ in range(ANSWER):
            tokens.append(int(mx.argmax(self.read(caches, tokens[-1:])).item()))
        return tokens[1:]

    def restart(self) -> None:
        """Let another engine follow that has the files only."""
        assert self.files.flush(WAIT_S)
        self.files.close(WAIT_S)
        self.start()

    def turn(self, prompt: list[int], shared: int = 0) -> tuple[list[int], int]:
        """Return the answer and the number of cached tokens, with the stores of an engine."""
        caches, length = self.cache.fetch(prompt)
        end = len(prompt) - 1
        checkpoints = self.cache.plan_checkpoints(prompt, start=length, shared=shared)
        stops = sorted({*range(length + PIECE, end, PIECE), *checkpoints, end})
        for start, stop in itertools.pairwise([length, *stops]):
            self.read(caches, prompt[start:stop])
            is_checkpoint = stop in (*checkpoints, end)
            self.cache.store(prompt[:stop], caches, is_checkpoint=is_checkpoint)
        tokens = self.answer(caches, prompt[-1])
        self.cache.store([*prompt, *tokens[:-1]], caches)
        return tokens, length


NAMES = [
    pytest.param(name, marks=[] if name in ("lfm2", "gpt_oss") else [pytest.mark.ci])
    for name in MODELS
]


@pytest.mark.parametrize("name", NAMES)
def test_conversations_share_the_beginning(tmp_path: Path, name: str) -> None:
    """The second one finds it if its end is known, the third one in any case, and both after a restart."""
    conversation = Conversation(name, tmp_path / "kv")
    dice = random.Random(6)
    has_windows_only = name in ("gemma3_text", "gemma4_text", "gpt_oss")
    for shared in (BEGINNING, 0):
        system = dice.choices(range(64), k=BEGINNING)
        prompts = [[*system, *dice.choices(range(64), k=MESSAGE)] for _ in range(4)]
        lengths = [conversation.turn(prompt, shared)[1] for prompt in prompts[:3]]
        conversation.restart()
        prompt = prompts[3]
        tokens, length = conversation.turn(prompt, shared)
        plain = conversation.make()
        conversation.read(plain, prompt[:-1])
        assert conversation.answer(plain, prompt[-1]) == tokens
        whole = BEGINNING // 64 * 64
        in_memory = BEGINNING if has_windows_only else whole
        second = in_memory if shared or has_windows_only else 512
        assert [*lengths, length] == [0, second, in_memory, whole]
    conversation.files.close(WAIT_S)


@pytest.mark.ci
@pytest.mark.parametrize("name", MODELS)
def test_a_long_conversation_is_cached_and_unchanged(tmp_path: Path, name: str) -> None:
    conversation = Conversation(name, tmp_path / "kv")
    dice = random.Random(4)
    prompt = dice.choices(range(64), k=SYSTEM)
    asked = cached = 0
    for number in range(TURNS):
        if number in (10, 20):
            conversation.restart()
        prompt = [*prompt, *dice.choices(range(64), k=MESSAGE)]
        tokens, length = conversation.turn(prompt)
        asked, cached = asked + len(prompt), cached + length
        if number in (1, 10, 20, 29):
            assert length == len(prompt) - MESSAGE - 1, f"turn {number}"
            plain = conversation.make()
            conversation.read(plain, prompt[:-1])
            assert conversation.answer(plain, prompt[-1]) == tokens
        prompt = [*prompt, *tokens]
    assert cached >= 0.95 * asked
    assert conversation.files.stats.damaged == 0
    conversation.files.close(WAIT_S)
