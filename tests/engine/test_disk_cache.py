"""An engine with a prefix cache on disk: answers stay the same, and a restart or kill -9 forgets nothing."""

import signal
from pathlib import Path
from typing import Any

import pytest

from schemas.kv_cache import KvCache
from tests.support.engine_process import START_S, Engine, Start, eventually

pytestmark = [pytest.mark.mlx]

QUESTION = "Tell me everything about prefixes that outlive their engine. " * 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 12}


def answers(engine: Engine) -> list[str]:
    """Return a greedy and a seeded answer."""
    replies = [engine.chat(QUESTION, **fields) for fields in (GREEDY, SEEDED)]
    return [str(reply.json["choices"][0]["message"]["content"]) for reply in replies]


@pytest.mark.ci
@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGTERM, marks=pytest.mark.ci), signal.SIGKILL]
)
def test_a_restarted_engine_reads_prompts_from_disk(
    engine: Engine, start: Start, tiny: Path, tmp_path: Path, end: signal.Signals
) -> None:
    fields = {"kv_cache": KvCache(disk_bytes="1Gi"), "prefix_disk_dir": tmp_path / "kv"}
    wanted = answers(engine)
    first = start(tiny, **fields)
    eventually(first.is_ready, within_s=START_S)
    assert answers(first) == wanted
    eventually(lambda: len(list((tmp_path / "kv").glob("*.kv"))) > 2, what="blocks on disk")
    first.process.send_signal(end)
    first.process.wait(START_S)
    second = start(tiny, **fields)
    eventually(second.is_ready, within_s=START_S)
    assert answers(second) == wanted
    figures = second.metrics()
    assert figures["prefix_cache_disk_read_blocks_total"] > 2
    assert figures["prefix_cache_disk_damaged_blocks_total"] == 0
