"""Quantizations of an agent: mlx-lm's converter in a child process, and a store that has the whole result or nothing."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from machinery.clock import SystemClock
from models import model_files, quantization
from models.model_store.integrity import check_model
from models.model_store.store import ModelStore
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.quantizations import (
    QuantizationOrder,
    QuantizationRefusedError,
    Quantizations,
)
from nodeagent.model_store.usage import ModelUsers
from schemas.wire import engine_config
from schemas.wire.stored_models import QuantizationReport, QuantizationScheme
from store.events import EventRecorder
from store.memory import MemoryTransport
from tests.support.engine_process import START_S, eventually, launching
from tests.support.hub import COMMIT
from tests.support.mlx_models import module
from tests.support.model_store import add_model
from tests.support.values import present
from tests.support.waiting import until

CLOCK = SystemClock()
SOURCE = "org--Tiny@1f2e3d4c5b6a"
REPO = "fleet/Tiny-1f2e3d4c5b6a-4bit-g64"
SCHEME = quantization.choose_scheme("affine")
ORDER = QuantizationOrder(source=SOURCE, scheme=SCHEME)
PLENTY = 1 << 40


def add_source(root: Path, **changes: object) -> ModelStore:
    """Put a tiny 16-bit model into a store."""
    folder = module("tests.support.tiny_model").make(root / "plain", dtype="bfloat16", **changes)
    store = ModelStore(root / "models", CLOCK)
    add_model(store, "org/Tiny", COMMIT, {one.name: one.read_bytes() for one in folder.iterdir()})
    return store


@asynccontextmanager
async def quantizing(store: ModelStore, *, memory: int = PLENTY) -> AsyncIterator[Quantizations]:
    async def users() -> ModelUsers:
        return ModelUsers({})

    recorder = EventRecorder(MemoryTransport(CLOCK), CLOCK, source="Node/mac-1")
    collector = ModelCollector(store, recorder, users, node="mac-1")
    quantizations = Quantizations(collector, CLOCK, available_bytes=lambda: memory)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(quantizations.run())
        await until(lambda: quantizations.is_ready, what="a start")
        yield quantizations
        running.cancel()


def report_of(jobs: Quantizations) -> QuantizationReport:
    return next(iter(jobs.reports()))


async def ended(jobs: Quantizations) -> QuantizationReport:
    await until(lambda: not report_of(jobs).is_running, what="the end", limit_s=100)
    return report_of(jobs)


def converters() -> list[psutil.Process]:
    """Return the converters that this process started."""
    return [
        child
        for child in psutil.Process().children()
        if engine_config.QUANTIZE_MODULE in child.cmdline()
    ]


def leftovers(store: ModelStore) -> list[Path]:
    return [*store.incoming.iterdir(), *store.fetches.iterdir()]


@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_a_result_is_whole_pinned_and_says_what_it_was_made_of(tmp_path: Path) -> None:
    store = add_source(tmp_path)
    async with quantizing(store) as jobs:
        first, second = await asyncio.gather(jobs.start(ORDER), jobs.start(ORDER))
        assert (first.repo, second.repo) == (REPO, REPO)
        await until(lambda: bool(converters()), what="a converter")
        assert len(converters()) == 1
        report = await ended(jobs)
        assert (report.phase, report.error) == ("Present", "")
        by_name = present(store.find_by_name(report.result or ""))
        assert by_name.is_pinned
        assert by_name.name.startswith("fleet--Tiny-1f2e3d4c5b6a-4bit-g64@")
        assert check_model(store, by_name.name, hashes=True) == ()
        config = json.loads((by_name.folder / "config.json").read_bytes())
        assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
        origin = json.loads((by_name.folder / "quantization_origin.json").read_bytes())
        scheme = {"mode": "affine", "bits": 4, "groupSize": 64}
        assert origin == {"repo": "org/Tiny", "commit": COMMIT, "scheme": scheme}
        quality = present(report.quality)
        assert (quality.tokens, quality.not_measured) == (2047, "")
        assert quality == quantization.read_quality(by_name.folder)
        assert 1 < present(quality.original_perplexity) < 2 * present(quality.perplexity)
        assert 0.2 < present(quality.top1_agreement) < 1  # random weights are nothing to rely on
        assert 0 < present(quality.mean_kl_divergence) < 1
        await until(lambda: leftovers(store) == [], what="an empty folder of fetches")
        again = await jobs.start(ORDER)
        assert (again.phase, again.result) == ("Present", by_name.name)
        assert again.quality == quality


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (quantization.choose_scheme("mxfp4"), "mxfp4"),
        (quantization.choose_scheme("nvfp4"), "nvfp4"),
        (quantization.choose_scheme("mxfp8"), "mxfp8"),
        *(
            (quantization.choose_scheme("affine", quant_predicate=recipe), f"{recipe}-g64")
            for recipe in quantization.RECIPES
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_each_scheme_gives_a_model_of_the_estimated_size_that_answers(
    tmp_path: Path, scheme: QuantizationScheme, name: str
) -> None:
    store = add_source(tmp_path, layers=8, hidden=128)
    source = present(store.find_by_name(SOURCE))
    async with quantizing(store) as jobs:
        estimate = (await jobs.start(replace(ORDER, scheme=scheme))).total_bytes
        report = await ended(jobs)
    assert (report.error, report.repo) == ("", f"fleet/Tiny-1f2e3d4c5b6a-{name}")
    result = present(store.find_by_name(report.result or ""))
    assert 0.9 < result.size_bytes / estimate < 1.1
    written = json.loads((result.folder / "config.json").read_bytes())["quantization"]
    assert (written["mode"], written["bits"]) == (scheme.mode, scheme.bits)
    assert (scheme.quant_predicate is None) == (len(written) == 3)
    # The memory proof takes all weights as they are in the files.
    facts = model_files.inspect_model(result.folder)
    files = sum(path.stat().st_size for path in result.folder.glob("*.safetensors"))
    assert 0.9 * files < facts.weight_bytes <= files * 1.1
    assert facts.weights.parameters == model_files.inspect_model(source.folder).weights.parameters
    with launching(tmp_path, tmp_path / "blas") as start:
        engine = start(result.folder)
        eventually(engine.is_ready, within_s=START_S)
        assert engine.chat("hello").json["usage"]["completion_tokens"] > 0


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_converter_that_is_killed_publishes_nothing_and_repeat_works(tmp_path: Path) -> None:
    store = add_source(tmp_path)
    async with quantizing(store) as jobs:
        await jobs.start(ORDER)
        await until(lambda: bool(converters()), what="a converter")
        os.kill(converters()[0].pid, signal.SIGKILL)
        report = await ended(jobs)
        assert report.phase == "Failed"
        assert "was killed by SIGKILL" in report.error
        assert [model.name for model in store.models()] == [SOURCE]
        await until(lambda: leftovers(store) == [], what="an empty folder")
        assert (await jobs.start(ORDER)).phase in ("Queued", "Converting")
        assert (await ended(jobs)).phase == "Present"


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_after_a_kill_of_the_agent_nothing_is_left_and_a_repeat_works(tmp_path: Path) -> None:
    store = add_source(tmp_path)
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.nodeagent.model_store.test_quantizations import CLOCK, ORDER, ModelStore, quantizing\n"
        "async def main():\n"
        "    async with quantizing(ModelStore(Path(sys.argv[1]), CLOCK)) as jobs:\n"
        "        await jobs.start(ORDER)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(store.root))
    try:
        process = psutil.Process(agent.pid)
        await until(lambda: bool(process.children()), what="a converter", limit_s=60)
        child = process.children()[0]
        (store.incoming / "sha256-half.making").mkdir()  # as if it had begun to write
    finally:
        agent.kill()
        await agent.wait()
    await until(
        lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE,
        what="the end of the converter",
        limit_s=60,
    )
    assert [model.name for model in store.models()] == [SOURCE]
    async with quantizing(store) as jobs:
        await until(lambda: not list(store.incoming.iterdir()), what="an empty folder")
        await jobs.start(ORDER)
        assert (await ended(jobs)).phase == "Present"


@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_a_cancelled_job_ends_its_converter_and_leaves_nothing(tmp_path: Path) -> None:
    store = add_source(tmp_path)
    async with quantizing(store) as jobs:
        await jobs.start(ORDER)
        await until(lambda: bool(converters()), what="a converter")
        child = converters()[0]
        cancelled = present(jobs.cancel(REPO.partition("/")[2]))
        assert cancelled.phase == "Cancelled"
        await until(lambda: not child.is_running(), what="the end of the converter")
        await until(lambda: leftovers(store) == [], what="an empty folder")
        assert jobs.cancel(REPO.partition("/")[2]) is None
        assert [model.name for model in store.models()] == [SOURCE]


@pytest.fixture
def full_store(tmp_path: Path) -> Iterator[ModelStore]:
    """A store with a source that writes to a file system of 64 KiB; only root on Linux can make one.

    Its admission sees the larger disk, as if another program took the room later.
    """
    program = shutil.which("mount")
    store = add_source(tmp_path)
    words = (str(program), "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(store.incoming))
    if program is None or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield store
    subprocess.run(["umount", str(store.incoming)], check=True)


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_disk_that_fills_up_fails_job_and_publishes_nothing(full_store: ModelStore) -> None:
    async with quantizing(full_store) as jobs:
        await jobs.start(ORDER)
        report = await ended(jobs)
        assert report.phase == "Failed"
        assert "left: free some, and repeat the command" in report.error
        await until(lambda: leftovers(full_store) == [], what="an empty folder")
        assert [model.name for model in full_store.models()] == [SOURCE]


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(120)
def test_a_converter_that_takes_too_much_memory_ends(tmp_path: Path) -> None:
    folder = module("tests.support.tiny_model").make(
        tmp_path / "plain", dtype="bfloat16", hidden=1024, heads=16, kv_heads=16, layers=8
    )
    words = (folder, tmp_path / "out", SCHEME.model_dump_json(), 8 << 20, 8 << 20, os.getpid())
    done = subprocess.run(
        [sys.executable, "-m", engine_config.QUANTIZE_MODULE, *map(str, words)],
        capture_output=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.endswith(b"it took more than 8 MiB of memory\n")


async def refused(jobs: Quantizations, order: QuantizationOrder) -> tuple[int, str]:
    with pytest.raises(QuantizationRefusedError) as info:
        await jobs.start(order)
    return info.value.status, str(info.value)


def plain_store(root: Path, config: str) -> ModelStore:
    """Return a store with a model whose one tensor has 4096 half-precision numbers."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8192]}})
    weights = len(header).to_bytes(8, "little") + header.encode() + bytes(8192)
    store = ModelStore(root / "models", CLOCK)
    files = {"config.json": config.encode(), "model.safetensors": weights}
    add_model(store, "org/Tiny", COMMIT, files)
    return store


async def test_what_cannot_be_quantized_is_refused_with_the_reason(tmp_path: Path) -> None:
    store = plain_store(tmp_path, '{"model_type": "llama"}')
    async with quantizing(store, memory=1 << 20) as jobs:
        status, message = await refused(jobs, ORDER)
        assert (status, message[:18]) == (409, "InsufficientMemory")
        assert "needs 1.0 GiB, and 1.0 MiB are available" in message
        gone = replace(ORDER, source="org--Gone@1f2e3d4c5b6a")
        assert await refused(jobs, gone) == (404, "org--Gone@1f2e3d4c5b6a is not on this Mac")
        bad = replace(ORDER, name="../x")
        assert (await refused(jobs, bad))[0] == 400
    store.reserve_bytes = 1 << 60
    async with quantizing(store) as jobs:
        status, message = await refused(jobs, ORDER)
        assert (status, message[:8]) == (409, "NoSpace:")
        assert leftovers(store) == []


async def test_a_model_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    config = '{"model_type": "llama", "quantization": {"bits": 8, "group_size": 64}}'
    async with quantizing(plain_store(tmp_path, config)) as jobs:
        status, message = await refused(jobs, ORDER)
        assert (status, f"{SOURCE} is quantized already to 8 bits" in message) == (409, True)


async def test_a_name_that_another_origin_has_is_refused(tmp_path: Path) -> None:
    store = plain_store(tmp_path, '{"model_type": "llama"}')
    scheme = quantization.choose_scheme("affine", 8)
    origin = {"repo": "org/Tiny", "commit": COMMIT, "scheme": scheme.model_dump(by_alias=True)}
    files = {"quantization_origin.json": json.dumps(origin).encode()}
    add_model(store, "fleet/small", "0" * 40, files)
    named = replace(ORDER, name="small")
    async with quantizing(store) as jobs:
        status, message = await refused(jobs, named)
        assert (status, "choose another --name" in message) == (409, True)
        same = replace(named, scheme=scheme)
        assert (await jobs.start(same)).result == "fleet--small@000000000000"
