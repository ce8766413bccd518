"""The preflight of Metal: the real check on MLX's CPU backend, and children that abort, hang or lie."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from nodeagent.engines.addresses import EngineAddresses
from nodeagent.engines.engine_processes import EngineOrder, EngineProcesses
from nodeagent.hardware import metal
from nodeagent.hardware.metal import MetalPreflight, MetalVerdict
from schemas.meta import ConditionStatus, find_condition
from schemas.node import MetalDevice, MlxBuild
from schemas.wire.engine_config import EngineConfig
from tests.support.reconciler_agents import node_status
from tests.support.values import present

CLOCK = SystemClock()
BUILD = MlxBuild(tag="macosx_26_0_arm64", minimum_system="26.2", has_jaccl=True, has_nax=True)
# What mx.device_info() says on an M5 Max with 128 GB.
GPU = MetalDevice(
    architecture="applegpu_g17s",
    memory_bytes=137_438_953_472,
    recommended_bytes=115_448_725_504,
    max_buffer_bytes=86_586_540_032,
)
RIGHT = "import json; print(json.dumps({'device': 'M4', 'isMetal': True, 'isRight': True}))"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.mlx
async def test_mlx_computes_on_this_machine() -> None:
    verdict = await metal.check_device(needs_metal=sys.platform == "darwin", limit_s=60)
    assert (verdict.is_available, verdict.reason) == (True, "MetalWorks")
    build = present(verdict.build)
    assert build.tag.startswith("macosx_" if sys.platform == "darwin" else "manylinux_")
    assert bool(build.minimum_system) == (sys.platform == "darwin")


@pytest.mark.mlx
@pytest.mark.skipif(sys.platform == "darwin", reason="has Metal")
async def test_a_mac_without_metal_is_told_apart_from_one_with_it() -> None:
    verdict = await metal.check_device(limit_s=60)
    assert (verdict.is_available, verdict.reason) == (False, "MetalMissing")


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [
        (RIGHT, "MetalWorks", "MLX computes on M4"),
        # What libmlx prints on a Mac without a usable GPU, and how it ends.
        (
            "import os, sys; print('[metal::load_device] No Metal device found', file=sys.stderr, flush=True); os.abort()",
            "MetalAborted",
            "killed by SIGABRT: [metal::load_device] No Metal device found",
        ),
        ("raise SystemExit(3)", "MetalAborted", "ended with 3"),
        ("print('hello')", "MetalCheckFailed", "printed no result"),
        ("", "MetalCheckFailed", "printed no result"),
        (RIGHT.replace("'isRight': True", "'isRight': False"), "MetalWrong", "M4 multiplied"),
        (RIGHT.replace("True}", "True, 'mlxBuild': {'tag': 1}}"), "MetalCheckFailed", "no result"),
        (RIGHT.replace("True}", "True, 'metalDevice': 7}"), "MetalCheckFailed", "no result"),
        (f"print('x' * 1_000_000); {RIGHT}", "MetalCheckFailed", "printed no result"),
    ],
)
async def test_the_verdict_of_a_check(code: str, reason: str, words: str) -> None:
    verdict = await metal.check_device(python(code), limit_s=60)
    assert verdict.reason == reason
    assert words in verdict.message
    assert verdict.is_available == (reason == "MetalWorks")


async def test_builds_and_memory_become_facts_of_the_node() -> None:
    line = json.dumps(
        {
            "device": "M5",
            "isMetal": True,
            "isRight": True,
            "mlxBuild": BUILD.model_dump(by_alias=True),
            "metalDevice": GPU.model_dump(by_alias=True),
        }
    )
    preflight = MetalPreflight(CLOCK, python(f"print({line!r})"), limit_s=60)
    await preflight.run(lambda: None)
    status = preflight.fill(node_status("a"), None)
    assert (status.mlx_build, status.metal_device) == (BUILD, GPU)


async def test_a_check_that_hangs_is_killed() -> None:
    verdict = await metal.check_device(python("import signal; signal.pause()"), limit_s=0.5)
    assert verdict.reason == "MetalHangs"


async def test_a_check_that_cannot_be_started(tmp_path: Path) -> None:
    verdict = await metal.check_device([str(tmp_path / "missing")])
    assert verdict.reason == "MetalCheckFailed"


async def test_no_engine_starts_until_the_gpu_works(tmp_path: Path) -> None:
    preflight = MetalPreflight(CLOCK, python("import os; os.abort()"), limit_s=60)
    engines = EngineProcesses(
        tmp_path,
        node="a",
        addresses=EngineAddresses(host="127.0.0.1", first=4100),
        refusal=lambda: preflight.refusal,
    )
    order = EngineOrder(config=EngineConfig(model_dir=tmp_path))
    with pytest.raises(OSError, match="is being checked"):
        engines.start(order, [])
    changed = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(preflight.run(changed.set))
        async with asyncio.timeout(60):
            await preflight.wait()
            await changed.wait()
        with pytest.raises(OSError, match="killed by SIGABRT"):
            engines.start(order, [])
        task.cancel()
    assert not engines.find()
    status = preflight.fill(node_status("a"), None)
    condition = present(find_condition(status.conditions, metal.METAL_AVAILABLE))
    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "MetalAborted")
    # A restart of the agent does not change the time of the condition.
    again = find_condition(preflight.fill(node_status("a"), status).conditions, "MetalAvailable")
    assert again == condition


def test_only_macs_are_checked() -> None:
    assert metal.preflight_of(CLOCK, Path(), "linux") is None
    assert metal.preflight_of(CLOCK, Path(), "darwin") is not None


def test_an_unknown_signal_has_its_number() -> None:
    verdict = metal.parse_check("", -99, needs_metal=True)
    assert verdict == MetalVerdict(
        is_available=False, reason="MetalAborted", message=verdict.message
    )
    assert "signal 99" in verdict.message
