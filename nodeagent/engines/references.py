"""Reference answers to the golden question: one process alone answers with the whole model, and the answer is stored."""

import asyncio
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from machinery.files import write_atomically
from machinery.processes import describe_exit, last_lines
from models import fingerprint
from nodeagent.engines.engine_processes import EngineOrder, end_references
from nodeagent.engines.group_launch import REFERENCE_TIMEOUT_S
from schemas.formation import GoldenAnswer
from schemas.wire import engine_config

log = logging.getLogger(__name__)

_GRACE_S = 10.0


class ReferenceState(StrEnum):
    """The progress of a reference answer, which is made before the ranks start."""

    NOT_TRIED = "NotTried"
    RUNNING = "Running"
    FOUND = "Found"
    FAILED = "Failed"


class ReferencesPort(Protocol):
    """The port to reference answers."""

    async def make(self, order: EngineOrder) -> GoldenAnswer:
        """Return the answer, made now or earlier. A cancelled call leaves no process behind.

        Raises:
            OSError: no answer can be made; the text says why.

        """
        ...

    def sweep(self) -> None:
        """End the processes that an earlier run of this agent left behind."""
        ...


class GoldenReferences:
    """The reference answers below one agent's state folder (`ReferencesPort`)."""

    def __init__(self, state_dir: Path) -> None:
        self._engines = state_dir / "engines"
        self._answers = state_dir / "goldens"

    async def make(self, order: EngineOrder) -> GoldenAnswer:
        """Return the answer, made now or earlier. A cancelled call leaves no process behind.

        Raises:
            OSError: no answer can be made; the text says why.

        """
        path = await asyncio.to_thread(self._path, order)
        answer = _read_answer(path)
        if answer is None:
            answer = await self._run(order)
            write_atomically(path, answer.model_dump_json(by_alias=True))
        return answer

    def _path(self, order: EngineOrder) -> Path:
        config = order.config
        adapter = config.adapter and config.adapter.name
        settings = (config.kv_cache.bits, config.window_setting, adapter)
        try:
            return self._answers / f"{fingerprint.compute(config.model_dir, settings)}.json"
        except ImportError as error:
            raise OSError(f"MLX is not installed on this node: {error}") from error

    async def _run(self, order: EngineOrder) -> GoldenAnswer:
        folder = self._engines / order.config.replica
        folder.mkdir(parents=True, exist_ok=True)
        alone = order.config.model_copy(update={"group": None})
        error_log = folder / "golden.log"
        with error_log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", engine_config.GOLDEN_MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(REFERENCE_TIMEOUT_S):
                output, _ = await process.communicate(alone.to_json())
        except TimeoutError as error:
            raise OSError(
                f"the reference process gave no answer in {REFERENCE_TIMEOUT_S:g} s"
            ) from error
        finally:
            await _end_process(process)
        if process.returncode != 0:
            end = describe_exit(process.returncode or 0)
            raise OSError(f"the reference process {end}: {last_lines(error_log, 1)}")
        try:
            return GoldenAnswer.model_validate_json(output)
        except ValidationError as error:
            raise OSError(
                f"the reference process gave an invalid answer: {output[:200]!r}"
            ) from error

    def sweep(self) -> None:
        """End the processes that an earlier run of this agent left behind."""
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
    """Makes references beside the loop, one for each replica, and keeps their results."""

    def __init__(self, port: ReferencesPort, group: asyncio.TaskGroup) -> None:
        self._port = port
        self._group = group
        self._references: dict[str, _ReferenceTask] = {}

    def start(self, order: EngineOrder) -> None:
        """Start to make a reference; an earlier one of the replica is ended."""
        self.stop(order.config.replica)
        reference = _ReferenceTask(order.config.replica_uid)
        self._references[order.config.replica] = reference
        reference.task = self._group.create_task(self._make(order, reference))

    async def _make(self, order: EngineOrder, reference: "_ReferenceTask") -> None:
        try:
            reference.golden = await self._port.make(order)
            reference.state = ReferenceState.FOUND
        except OSError as error:
            # The group's own first answer is used then, if it is sane.
            log.warning(
                "no reference for the golden answer",
                extra={"replica": order.config.replica, "why": str(error)},
            )
            reference.state = ReferenceState.FAILED

    def stop(self, replica: str) -> None:
        """End and forget the reference of a replica."""
        reference = self._references.pop(replica, None)
        if reference is not None and reference.task is not None:
            reference.task.cancel()

    @property
    def is_busy(self) -> bool:
        """True if a reference is being made now."""
        return any(
            reference.state is ReferenceState.RUNNING for reference in self._references.values()
        )

    def observe(self, replica: str, uid: str | None) -> tuple[ReferenceState, GoldenAnswer | None]:
        """Return state and answer; a reference of an earlier replica of that name is ended. None: any uid."""
        reference = self._references.get(replica)
        if reference is None:
            return ReferenceState.NOT_TRIED, None
        if uid is not None and reference.uid != uid:
            self.stop(replica)
            return ReferenceState.NOT_TRIED, None
        return reference.state, reference.golden


class _ReferenceTask:
    """One reference that is being made, or was made."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.state = ReferenceState.RUNNING
        self.golden: GoldenAnswer | None = None
        self.task: asyncio.Task[None] | None = None
