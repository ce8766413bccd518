"""Has one process answer the golden question with all of a model, and keeps the answer. Judges nothing."""

import asyncio
import logging
import sys
from pathlib import Path

from pydantic import ValidationError

from machinery.files import write_atomically
from machinery.processes import last_lines
from nodeagent.engine.openai import fingerprint
from nodeagent.engines import GOLDEN_MODULE, EngineOrder, end_references, told
from nodeagent.groups import REFERENCE_S
from nodeagent.observe import Reference
from nodeagent.parts import ReferencesPort
from schemas.formation import Golden

log = logging.getLogger(__name__)

_GRACE_S = 10.0


def command(order: EngineOrder) -> list[str]:
    """Return the command line of the process that answers alone (nodeagent/engine/golden.py)."""
    return [
        *(sys.executable, "-m", GOLDEN_MODULE),
        *("--model-dir", str(order.model_dir)),
        *("--context-length", str(order.context_length)),
        *told("--kv-bits", order.kv_bits),
        *told("--kv-window", order.kv_window),
        *told("--adapter", order.adapter),
    ]


class References:
    """The answers below one agent's state folder (`ReferencesPort`)."""

    def __init__(self, state_dir: Path) -> None:
        self._engines = state_dir / "engines"
        self._answers = state_dir / "goldens"

    async def make(self, order: EngineOrder) -> Golden:
        """Return the answer, made now or earlier. Cancelled, it leaves nothing behind.

        Raises:
            OSError: there is none, and why.

        """
        path = await asyncio.to_thread(self._path, order)
        kept = _read(path)
        if kept is None:
            kept = await self._run(order)
            write_atomically(path, kept.model_dump_json(by_alias=True))
        return kept

    def _path(self, order: EngineOrder) -> Path:
        shaping = (order.kv_bits, order.kv_window, order.adapter and order.adapter.name)
        try:
            return self._answers / f"{fingerprint.of(order.model_dir, shaping)}.json"
        except ImportError as error:
            raise OSError(f"there is no MLX here: {error}") from error

    async def _run(self, order: EngineOrder) -> Golden:
        folder = self._engines / order.replica
        folder.mkdir(parents=True, exist_ok=True)
        words = folder / "golden.log"
        with words.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command(order),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(REFERENCE_S):
                said, _ = await process.communicate()
        except TimeoutError as error:
            raise OSError(f"one process alone made no answer in {REFERENCE_S:g} s") from error
        finally:
            await _end(process)
        if process.returncode != 0:
            raise OSError(
                f"one process alone ended with {process.returncode}: {last_lines(words, 1)}"
            )
        try:
            return Golden.model_validate_json(said)
        except ValidationError as error:
            raise OSError(
                f"one process alone answered what is no answer: {said[:200]!r}"
            ) from error

    def sweep(self) -> None:
        """End what an earlier run of this agent left behind."""
        end_references(self._engines)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _read(path: Path) -> Golden | None:
    try:
        return Golden.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


class ReferenceMaker:
    """Makes references beside the loop, one for a replica, and remembers how that went."""

    def __init__(self, port: ReferencesPort, group: asyncio.TaskGroup) -> None:
        self._port = port
        self._group = group
        self._made: dict[str, _Making] = {}

    def start(self, order: EngineOrder) -> None:
        """Begin, unless it was begun."""
        self.stop(order.replica)
        making = _Making(order.replica_uid)
        self._made[order.replica] = making
        making.task = self._group.create_task(self._make(order, making))

    async def _make(self, order: EngineOrder, making: "_Making") -> None:
        try:
            making.golden = await self._port.make(order)
            making.state = Reference.FOUND
        except OSError as error:
            # Then the group's own first answer has to do, if it is sane.
            log.warning(
                "no reference for the golden answer",
                extra={"replica": order.replica, "why": str(error)},
            )
            making.state = Reference.FAILED

    def stop(self, replica: str) -> None:
        """End what runs for a replica, and forget it."""
        making = self._made.pop(replica, None)
        if making is not None and making.task is not None:
            making.task.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether one is being made now."""
        return any(making.state is Reference.RUNNING for making in self._made.values())

    def look(self, replica: str, uid: str | None) -> tuple[Reference, Golden | None]:
        """Return how it went; what is of an earlier replica of the name is ended. `uid` None: whichever it is."""
        making = self._made.get(replica)
        if making is None:
            return Reference.NOT_TRIED, None
        if uid is not None and making.uid != uid:
            self.stop(replica)
            return Reference.NOT_TRIED, None
        return making.state, making.golden


class _Making:
    """One reference that is made, or was."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.state = Reference.RUNNING
        self.golden: Golden | None = None
        self.task: asyncio.Task[None] | None = None
