"""Load of one engine for a report: its memory by two sources, and what stays wired after its end and after a kill."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp
import psutil

from fleetctl.mac_report.mac_programs import MacPrograms
from fleetctl.mac_report.readings import EngineMemory
from machinery import macos_commands as mac
from machinery.footprint import footprint_bytes
from models.model_files import model_folders
from nodeagent.hardware import macos
from schemas.wire.engine_config import EngineConfig

_READY_S: Final = 180.0
_END_S: Final = 40.0
_QUESTION: Final = {
    "model": "model", "max_tokens": 256, "messages": [{"role": "user", "content": "Count to one hundred."}],
}  # fmt: skip


async def measure_engine(programs: MacPrograms, model: Path, load_s: float) -> EngineMemory:
    """Run an engine on the model for some seconds twice: ended by SIGTERM, then by SIGKILL.

    Raises:
        OSError: it does not start, or does not answer.

    """
    before = EngineMemory(
        weights=model_folders(model.parent).get(model.name, 0),
        wired_before=await _wired(programs),
        thermal_before=await _thermal(programs),
    )
    memory = await _run(programs, model, load_s, signal.SIGTERM, before)
    killed = await _run(programs, model, 1.0, signal.SIGKILL, before)
    return replace(memory, wired_after_kill=killed.wired_after_end)


async def _run(
    programs: MacPrograms, model: Path, load_s: float, end: signal.Signals, memory: EngineMemory
) -> EngineMemory:
    with TemporaryDirectory(prefix="mlx-fleet-") as name:
        folder = Path(name)
        config, log, socket = folder / "config.json", folder / "log", folder / "engine.sock"
        config.write_bytes(EngineConfig(model_dir=model.absolute(), url=f"unix:{socket}").to_json())
        config.chmod(0o600)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "engine", "--config", str(config)),
                stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            await _generate(programs, process, socket, load_s)
            memory = replace(
                memory, wired_loaded=await _wired(programs), thermal_after=await _thermal(programs)
            )
            memory = replace(memory, footprint=_footprint(process.pid))
        except (aiohttp.ClientError, TimeoutError) as error:
            lines = log.read_text(errors="replace").splitlines()
            raise OSError(
                f"the engine on {model.name}: {lines[-1][:200] if lines else error}"
            ) from error
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(end)
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
    return replace(memory, wired_after_end=await _wired(programs))


async def _generate(programs: MacPrograms, process: Process, socket: Path, load_s: float) -> None:
    """Wait for the engine, and send it requests one after another."""
    clock = programs.clock
    async with asyncio.timeout(_READY_S + load_s):
        while not socket.exists():
            if process.returncode is not None:
                raise TimeoutError("it ended while it started")
            await clock.sleep(0.1)
        connector = aiohttp.UnixConnector(str(socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                async with session.get("http://engine/ready") as answer:
                    if answer.status == 200:
                        break
                await clock.sleep(0.1)
            end = clock.monotonic() + load_s
            while True:
                async with session.post(
                    "http://engine/v1/chat/completions", json=_QUESTION
                ) as answer:
                    answer.raise_for_status()
                    json.loads(await answer.read())
                if clock.monotonic() >= end:
                    return


def _footprint(pid: int) -> int:
    """Return the memory of a process and of its children in bytes."""
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        pids = [pid]
    return sum(footprint_bytes(number) or 0 for number in pids)


async def _wired(programs: MacPrograms) -> int:
    pages = macos.parse_mac_memory((await programs.call(mac.VM_STAT)).out, "")
    return pages.wired_bytes if pages else 0


async def _thermal(programs: MacPrograms) -> int | None:
    return macos.parse_thermal_level((await programs.call(mac.THERMAL_LEVEL)).out)
