"""Services without a service manager: a supervisor of ours for each program, for containers and other systems.

Nothing starts a supervisor at boot, and nothing restarts one that is killed: its program goes on, and the next `start`
adopts it.
"""

import fcntl
import json
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

from fleetctl.services import definition_files
from fleetctl.services.port import ServiceError, ServiceSpec, ServiceState
from machinery import processes
from machinery.clock import Clock
from machinery.environment import child_environment
from machinery.files import read_text

_POLL_S: Final = 0.05
_START_LIMIT_S: Final = 30.0
# Settings of the caller's fleet: a service has the flags of its definition and nothing else.
_NOT_INHERITED: Final = ("FLEET_",)
# Beyond the time that the program has to end.
_END_MARGIN_S: Final = 15.0


class PlainFiles:
    """The files of one service in the folder of the plain adapter."""

    def __init__(self, folder: Path, name: str) -> None:
        self.definition = folder / f"{name}.json"
        self.program = folder / f"{name}.pid"
        """Record of the program's process."""
        self.supervisor = folder / f"{name}.supervisor.pid"
        """Record of the supervisor's process."""
        self.log = folder / f"{name}.supervisor.log"
        self.restarts = folder / f"{name}.restarts"
        """Restarts of the program by its supervisor, as a number."""
        self._lock = folder / f"{name}.lock"

    def lock(self) -> IO[bytes] | None:
        """Take the lock that a supervisor holds while it lives; None if another one holds it."""
        file = self._lock.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def is_supervised(self) -> bool:
        """Return whether a supervisor lives."""
        if not self._lock.exists():
            return False
        file = self.lock()
        if file is None:
            return True
        file.close()
        return False

    def delete(self) -> None:
        """Delete all files of the service but its log; the definition last, by which a killed `remove` is found."""
        rotated = self.log.with_name(f"{self.log.name}.1")
        records = (self.program, self.supervisor, self.restarts)
        for path in (*records, self.log, rotated, self._lock, self.definition):
            definition_files.delete(path)

    def read_restarts(self) -> int | None:
        """Return how often the supervisor restarted the program; None if it has not said."""
        text = read_text(self.restarts)[:10]
        return int(text) if text.isdecimal() else None


def read_definition(path: Path) -> ServiceSpec:
    """Return the definition in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no definition.

    """
    tree = json.loads(path.read_bytes())
    try:
        return ServiceSpec(
            name=tree["name"],
            command=tuple(tree["command"]),
            log=Path(tree["log"]),
            working_folder=Path(tree["working_folder"]),
            python=Path(tree["python"]),
            environment=tuple((key, value) for key, value in tree["environment"]),
            stop_timeout_s=int(tree["stop_timeout_s"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no definition of a service: {error!r}") from error


class PlainServices:
    """`Services` with a supervisor of ours; programs run as the user of the caller."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """`folder` holds the definitions and the records of processes."""
        self._folder = folder
        self._clock = clock
        # Supervisors that this process started: they are reaped when they end.
        self._started: dict[str, processes.ChildProcess] = {}

    async def install(self, spec: ServiceSpec) -> None:
        files = PlainFiles(self._folder, spec.name)
        content = json.dumps(asdict(spec), default=str, indent=1).encode()
        if not definition_files.has_content(files.definition, content):
            await self.stop(spec.name)
            definition_files.write(files.definition, content)

    async def start(self, name: str) -> None:
        files = PlainFiles(self._folder, name)
        try:
            spec = read_definition(files.definition)
        except FileNotFoundError as error:
            raise ServiceError(
                f"{name} is not installed: {files.definition} does not exist"
            ) from error
        except (OSError, ValueError) as error:
            raise ServiceError(f"cannot read the definition of {name}: {error}") from error
        starter = None if files.is_supervised() else self._spawn(spec, files)
        if starter is not None:
            killed = self._started.get(name)
            if killed is not None:
                await processes.wait_ended(killed, self._clock, limit_s=_END_MARGIN_S)
            self._started[name] = starter
        deadline = self._clock.monotonic() + _START_LIMIT_S
        while processes.adopt(files.program) is None or not files.is_supervised():
            is_over = starter is not None and not starter.running() and not files.is_supervised()
            if is_over or self._clock.monotonic() >= deadline:
                words = processes.last_lines(files.log, 1) or processes.last_lines(spec.log, 1)
                raise ServiceError(f"{name} does not start: {words or f'see {spec.log}'}")
            await self._clock.sleep(_POLL_S)

    def _spawn(self, spec: ServiceSpec, files: PlainFiles) -> processes.ChildProcess:
        """Start a supervisor, which takes the lock and writes its own record."""
        command = (
            *(str(spec.python), "-m", "fleetctl.services.plain_supervisor"),
            *(str(self._folder), spec.name),
        )
        try:
            return processes.spawn(
                command,
                log=files.log,
                cwd=spec.working_folder,
                environment=child_environment(dict(spec.environment), without=_NOT_INHERITED),
            )
        except OSError as error:
            raise ServiceError(f"cannot start {spec.name}: {error}") from error

    async def stop(self, name: str) -> None:
        files = PlainFiles(self._folder, name)
        try:
            grace_s = float(read_definition(files.definition).stop_timeout_s)
        except (OSError, ValueError):
            grace_s = 30.0
        # The supervisor first: it would start the program again. It ends its program itself.
        for record, limit_s in (
            (files.supervisor, grace_s + _END_MARGIN_S),
            (files.program, grace_s),
        ):
            child = processes.adopt(record)
            if child is not None:
                await processes.end(child, self._clock, grace_s=limit_s)
            definition_files.delete(record)
        started = self._started.pop(name, None)
        if started is not None:
            await processes.wait_ended(started, self._clock, limit_s=_END_MARGIN_S)

    async def state(self, name: str) -> ServiceState:
        files = PlainFiles(self._folder, name)
        child = processes.adopt(files.program)
        is_installed = files.definition.exists()
        is_supervised = files.is_supervised()
        note = ""
        if child is not None and not is_supervised:
            note = f"its supervisor is gone, so nothing restarts it; run `fleetctl service start {name}`"
        return ServiceState(
            is_installed=is_installed,
            pid=child.record.pid if child is not None else None,
            restarts=files.read_restarts(),
            note=note,
        )

    async def remove(self, name: str) -> None:
        await self.stop(name)
        PlainFiles(self._folder, name).delete()
