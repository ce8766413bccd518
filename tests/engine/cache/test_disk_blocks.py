"""The prefix cache on disk, on real models: a new process continues from files, and a bad file costs time only."""

import logging
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.cache.block_files import BlockFiles
from tests.support.engine_cache_models import Tiny
from tests.support.mlx_models import Late

pytestmark = pytest.mark.mlx
mx: Any = Late("mlx.core")
utils: Any = Late("mlx.utils")
prefix_cache: Any = Late("engine.cache.prefix_cache")
disk_blocks: Any = Late("engine.cache.disk_blocks")

WAIT_S = 30.0
LIMIT = 1 << 30
PROMPT = random.Random(3).choices(range(64), k=300)
FULL = 256
"""Tokens of the prompt's full blocks."""


def arrays_of(state: Any) -> list[Any]:
    """Return the arrays in a cache's state."""
    return [one for _, one in utils.tree_flatten(state) if isinstance(one, mx.array)]


class Machine:
    """A folder, and the caches of processes that use it one after another."""

    def __init__(self, folder: Path, name: str = "llama") -> None:
        self.folder = folder
        self.tiny = Tiny(name)

    def start(
        self, model: str = "m", limit_bytes: int = LIMIT, memory_bytes: int = LIMIT
    ) -> tuple[Any, BlockFiles]:
        """Return the cache of a new process, and its files."""
        files = BlockFiles(self.folder, limit_bytes=limit_bytes)
        disk = disk_blocks.BlockDisk(files=files, model=model)
        cache = prefix_cache.BlockPrefixCache(self.tiny.make, limit_bytes=memory_bytes, disk=disk)
        return cache, files

    def fill(self, tokens: list[int] = PROMPT, limit_bytes: int = LIMIT) -> BlockFiles:
        """Store a prompt in a process that then ends; return its files."""
        cache, files = self.start(limit_bytes=limit_bytes)
        caches = self.tiny.read_and_store(cache, tokens, [len(tokens)])
        for _ in range(len(tokens) // 64):
            assert files.flush(WAIT_S)
            cache.store(tokens, caches)
        files.close(WAIT_S)
        return files

    @property
    def blocks(self) -> list[Path]:
        """The files of blocks, those of a prompt in its order: the first is the youngest."""
        files = self.folder.glob("*.kv")
        return sorted(files, key=lambda path: -path.stat().st_mtime_ns)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "kv")


@pytest.mark.parametrize("name", ["llama", "quantized", "mla"])
def test_a_restarted_engine_continues_with_the_same_values(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path / "kv", name)
    machine.fill()
    cache, files = machine.start()
    caches, length = cache.fetch(PROMPT)
    assert length == FULL
    whole = machine.tiny.make()
    machine.tiny.read(whole, PROMPT[:FULL])
    for one, two in zip(caches, whole, strict=True):
        pairs = zip(arrays_of(one.state), arrays_of(two.state), strict=True)
        assert all(mx.allclose(*pair, rtol=1e-4, atol=1e-4).item() for pair in pairs)
    assert (files.stats.read, files.stats.written) == (4, 0)
    files.close(WAIT_S)


def test_a_match_is_as_good_as_one_in_memory(machine: Machine) -> None:
    machine.fill()
    cache, files = machine.start()
    memory = machine.tiny.cache()
    machine.tiny.read_and_store(memory, PROMPT, [FULL])
    for tokens in (PROMPT, PROMPT[:200], [*PROMPT[:70], *[63] * 80], PROMPT[:256]):
        wanted, expected = memory.fetch(tokens)
        found, length = cache.fetch(tokens)
        assert length <= expected
        assert length == expected or length % 64 == 0
        if length == expected:
            one, two = (
                machine.tiny.say(found, tokens[length:]),
                machine.tiny.say(wanted, tokens[length:]),
            )
            assert mx.array_equal(one[0], two[0]).item()
    files.close(WAIT_S)


@pytest.mark.parametrize(("model", "salt"), [("other", ""), ("m", "tenant")])
def test_another_model_or_salt_finds_nothing(machine: Machine, model: str, salt: str) -> None:
    machine.fill()
    cache, files = machine.start(model)
    assert cache.fetch(PROMPT, salt)[1] == 0
    files.close(WAIT_S)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _empty, _flip])
def test_a_damaged_file_is_deleted_and_computed_anew(
    machine: Machine, damage: Callable[[Path], None]
) -> None:
    machine.fill()
    damage(machine.blocks[2])
    cache, files = machine.start()
    caches, length = cache.fetch(PROMPT)
    assert (length, files.stats.damaged, len(machine.blocks)) == (128, 1, 3)
    machine.tiny.read(caches, PROMPT[length:])
    cache.store(PROMPT, caches)
    files.close(WAIT_S)
    assert (files.stats.written, len(machine.blocks)) == (1, 4)


def test_a_file_of_another_block_is_not_used(machine: Machine) -> None:
    machine.fill()
    first, second = machine.blocks[:2]
    first.write_bytes(second.read_bytes())
    cache, files = machine.start()
    assert cache.fetch(PROMPT)[1] == 0
    assert files.stats.damaged == 1
    files.close(WAIT_S)


def test_files_that_vanish_are_computed_anew(machine: Machine) -> None:
    machine.fill()
    cache, files = machine.start()
    for path in machine.blocks[1:]:
        path.unlink()
    assert cache.fetch(PROMPT)[1] == 64
    assert files.stats.damaged == 0
    files.close(WAIT_S)


def test_two_engines_share_a_folder(machine: Machine) -> None:
    one, files = machine.start()
    other, others = machine.start()
    machine.tiny.read_and_store(one, PROMPT, [len(PROMPT)])
    assert files.flush(WAIT_S)
    assert other.fetch(PROMPT)[1] == FULL
    files.close(WAIT_S)
    others.close(WAIT_S)


def test_the_least_recently_used_files_go_first(machine: Machine) -> None:
    machine.fill()
    size = sum(path.stat().st_size for path in machine.blocks)
    old = {path.name for path in machine.blocks}
    for path in machine.blocks:
        os.utime(path, (1, 1))
    later = [(token + 1) % 64 for token in PROMPT]
    files = machine.fill(later, limit_bytes=size + size // 8)
    names = {path.name for path in machine.blocks}
    assert sum(path.stat().st_size for path in machine.blocks) <= size + size // 8
    assert len(names - old) == 4
    assert not names & old
    assert files.stats.evicted == 4
    cache, files = machine.start()
    assert cache.fetch(later)[1] == FULL
    files.close(WAIT_S)


def test_blocks_beyond_what_may_wait_are_dropped_and_offered_again(machine: Machine) -> None:
    machine.fill()
    size = max(path.stat().st_size for path in machine.blocks)
    for path in machine.blocks:
        path.unlink()
    files = machine.fill(limit_bytes=6 * size)
    assert files.stats.dropped
    assert len(machine.blocks) == 4


def test_a_full_disk_costs_one_log_line_and_no_request(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    cache, files = machine.start()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
        try:
            machine.tiny.read_and_store(cache, PROMPT, [len(PROMPT)])
            assert files.flush(WAIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.message for record in caplog.records] == ["prefix cache not written to disk"]
    assert (files.stats.dropped, list(machine.folder.iterdir())) == (4, [])
    caches, length = cache.fetch(PROMPT)
    assert length == len(PROMPT) - 1
    cache.store(PROMPT, caches)
    files.close(WAIT_S)
    assert len(machine.blocks) == 4


def test_only_the_user_can_read_the_files(machine: Machine) -> None:
    machine.fill()
    assert machine.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in machine.blocks} == {0o600}


COSTLY = [pytest.param(name, marks=pytest.mark.ci) for name in ("gemma3", "mamba", "falcon_h1")]


@pytest.mark.parametrize("name", ["lfm2", "rotating", "keeping", *COSTLY])
def test_windows_and_states_continue_where_a_prompt_ended(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path / "kv", name)
    machine.fill()
    cache, files = machine.start()
    longer = [*PROMPT, 5, 6, 7]
    for _ in range(2):  # from disk, and from memory
        caches, length = cache.fetch(longer)
        assert length == len(PROMPT)
        answers = machine.tiny.say(caches, longer[length:], PROMPT[:40])
        plain = machine.tiny.say(machine.tiny.make(), longer, PROMPT[:40])
        for logits, wanted in zip(answers, plain, strict=True):
            assert mx.allclose(logits, wanted, rtol=1e-3, atol=1e-3).item()
    assert files.stats.damaged == 0
    files.close(WAIT_S)


@pytest.mark.parametrize("name", ["lfm2", COSTLY[0]])
def test_any_damaged_file_of_a_stateful_model_costs_time_only(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path / "kv", name)
    machine.fill()
    count = len(machine.blocks)
    for number in range(count):
        _flip(sorted(machine.blocks)[number])
        cache, files = machine.start()
        caches, length = cache.fetch([*PROMPT, 5])
        assert length <= len(PROMPT)
        (logits,) = machine.tiny.say(caches, [*PROMPT, 5][length:])
        (wanted,) = machine.tiny.say(machine.tiny.make(), [*PROMPT, 5])
        assert mx.allclose(logits, wanted, rtol=1e-3, atol=1e-3).item()
        assert files.stats.damaged == 1
        files.close(WAIT_S)
        machine.fill()
        assert len(machine.blocks) == count


def test_a_state_of_another_shape_is_deleted(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "kv", "lfm2")
    machine.fill()
    cache, files = machine.start()
    for path in machine.blocks:
        content = files.read(path.stem)
        assert content is not None
        if "trees" in content.header:
            header = {**content.header, "trees": [1, 2, 3]}
            assert files.offer(path.stem, header, 0, partial(list, [content.values]))
    assert files.flush(WAIT_S)
    assert cache.fetch([*PROMPT, 5])[1] == 0
    assert files.stats.damaged == 1
    files.close(WAIT_S)


def test_a_prompt_in_progress_leaves_no_state_on_disk(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "kv", "lfm2")
    cache, files = machine.start()
    caches = machine.tiny.make()
    machine.tiny.read(caches, PROMPT)
    cache.store(PROMPT, caches, is_checkpoint=False)
    assert files.flush(WAIT_S)
    assert files.stats.written == FULL // 64
    files.close(WAIT_S)


_WRITER = """
import sys
from pathlib import Path
from engine.cache.block_files import BlockFiles
files = BlockFiles(Path(sys.argv[1]), limit_bytes=1 << 30)
for number in range(1 << 30):
    files.offer(f"{number:064x}", {}, 1 << 20, lambda: [bytes(1 << 20)])
    if number == 5:
        print("writing", flush=True)
    files.flush(0.001)
"""


def test_after_kill_9_every_file_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    files = BlockFiles(folder, limit_bytes=LIMIT)
    names = [path.stem for path in folder.glob("*.kv")]
    assert all(files.read(name) is not None for name in names)
    assert files.stats.damaged == 0
    files.close(WAIT_S)
