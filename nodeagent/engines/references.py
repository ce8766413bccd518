"""Has one process answer the golden question with all of a model, and keeps the answer. Judges nothing."""

import asyncio
import logging
import sys
from pathlib import Path

from pydantic import ValidationError

from machinery.files import write_atomically
from machinery.processes import last_lines
from models import fingerprint
from nodeagent.dependencies import ReferencesPort
from nodeagent.engines.engine_processes import (
    GOLDEN_MODULE,
    EngineOrder,
    end_references,
    optional_flag,
)
from nodeagent.engines.group_launch import REFERENCE_TIMEOUT_S
from nodeagent.replicas.observed import ReferenceState
from schemas.formation import GoldenAnswer

log = logging.getLogger(__name__)

_GRACE_S = 10.0


def reference_command(order: EngineOrder) -> list[str]:
    """Return the command line of the process that answers alone (nodeagent/engine/golden.py)."""
    return [
        *(sys.executable, "-m", GOLDEN_MODULE),
        *("--model-dir", str(order.model_dir)),
        *("--context-length", str(order.context_length)),
        *optional_flag("--kv-bits", order.kv_bits),
        *optional_flag("--kv-window", order.kv_window),
        *optional_flag("--adapter", order.adapter),
    ]


class GoldenReferences:
    """The answers below one agent's state folder (`ReferencesPort`)."""

    def __init__(self, state_dir: Path) -> None:
        self._engines = state_dir / "engines"
        self._answers = state_dir / "goldens"

    async def make(self, order: EngineOrder) -> GoldenAnswer:
        """Return the answer, made now or earlier. Cancelled, it leaves nothing behind.

        Raises:
            OSError: there is none, and why.

        """
        path = await asyncio.to_thread(self._path, order)
        kept = _read_answer(path)
        if kept is None:
            kept = await self._run(order)
            write_atomically(path, kept.model_dump_json(by_alias=True))
        return kept

    def _path(self, order: EngineOrder) -> Path:
        shaping = (order.kv_bits, order.kv_window, order.adapter and order.adapter.name)
        try:
            return self._answers / f"{fingerprint.compute(order.model_dir, shaping)}.json"
        except ImportError as error:
            raise OSError(f"there is no MLX here: {error}") from error

    async def _run(self, order: EngineOrder) -> GoldenAnswer:
        folder = self._engines / order.replica
        folder.mkdir(parents=True, exist_ok=True)
        words = folder / "golden.log"
        with words.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *reference_command(order),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(REFERENCE_TIMEOUT_S):
                said, _ = await process.communicate()
        except TimeoutError as error:
            raise OSError(
                f"one process alone made no answer in {REFERENCE_TIMEOUT_S:g} s"
            ) from error
        finally:
            await _end_process(process)
        if process.returncode != 0:
            raise OSError(
                f"one process alone ended with {process.returncode}: {last_lines(words, 1)}"
            )
        try:
            return GoldenAnswer.model_validate_json(said)
        except ValidationError as error:
            raise OSError(
                f"one process alone answered what is no answer: {said[:200]!r}"
            ) from error

    def sweep(self) -> None:
        """End what an earlier run of this agent left behind."""
        end_references(self._engines)


async def _end_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _read_answer(path: Path) -> GoldenAnswer | None:
    try:
        return GoldenAnswer.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


class ReferenceTasks:
    """Makes references beside the loop, one for a replica, and remembers how that went."""

    def __init__(self, port: ReferencesPort, group: asyncio.TaskGroup) -> None:
        self._port = port
        self._group = group
        self._made: dict[str, _ReferenceTask] = {}

    def start(self, order: EngineOrder) -> None:
        """Begin, unless it was begun."""
        self.stop(order.replica)
        making = _ReferenceTask(order.replica_uid)
        self._made[order.replica] = making
        making.task = self._group.create_task(self._make(order, making))

    async def _make(self, order: EngineOrder, making: "_ReferenceTask") -> None:
        try:
            making.golden = await self._port.make(order)
            making.state = ReferenceState.FOUND
        except OSError as error:
            # Then the group's own first answer has to do, if it is sane.
            log.warning(
                "no reference for the golden answer",
                extra={"replica": order.replica, "why": str(error)},
            )
            making.state = ReferenceState.FAILED

    def stop(self, replica: str) -> None:
        """End what runs for a replica, and forget it."""
        making = self._made.pop(replica, None)
        if making is not None and making.task is not None:
            making.task.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether one is being made now."""
        return any(making.state is ReferenceState.RUNNING for making in self._made.values())

    def look(self, replica: str, uid: str | None) -> tuple[ReferenceState, GoldenAnswer | None]:
        """Return how it went; what is of an earlier replica of the name is ended. `uid` None: whichever it is."""
        making = self._made.get(replica)
        if making is None:
            return ReferenceState.NOT_TRIED, None
        if uid is not None and making.uid != uid:
            self.stop(replica)
            return ReferenceState.NOT_TRIED, None
        return making.state, making.golden


class _ReferenceTask:
    """One reference that is made, or was."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.state = ReferenceState.RUNNING
        self.golden: GoldenAnswer | None = None
        self.task: asyncio.Task[None] | None = None
