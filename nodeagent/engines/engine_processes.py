"""Engine processes of this node: start, find again, stop, and the epochs that were used up. Knows nothing of the store.

`replicas/engine_tracker.py` judges why an engine ended, and `status.py` words it. An engine that SIGKILL ended has exit
code -9 here (137 in a shell).

The process table is the record: an engine's command line holds its identity, and its working folder says to which agent
it belongs. So an agent that was killed at any moment, even between the start of an engine and a note of it, finds all
its engines again (docs/adr/0005-engines-are-child-processes.md).
"""

import asyncio
import contextlib
import json
import resource
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from machinery import environment, processes
from machinery.clock import Clock
from machinery.files import read_text, write_atomically
from machinery.processes import process_start
from nodeagent.engines import engine_logs, group_launch, prefix_folders
from nodeagent.engines.addresses import EngineAddresses
from nodeagent.engines.group_launch import RankLaunch
from schemas.wire import engine_config
from schemas.wire.engine_address import EngineAddress
from schemas.wire.engine_config import EngineConfig, EngineIdentity

# mlx-lm sets this limit when it is imported, which fails below it.
_MIN_OPEN_FILES = 4096
_EPOCH_FILE = "epoch.json"
_ADDRESS_FILE = "address"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """An engine to start."""

    config: EngineConfig
    """Its configuration, without its node and address."""
    deployment: str = ""
    """Its deployment, whose engines share cached prompts on the disk."""
    launch: RankLaunch | None = None
    """The start of its rank; None for an engine that has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """An engine that this agent, or an earlier run of it, started."""

    replica: str
    replica_uid: str
    served_name: str
    address: EngineAddress
    child: processes.ProcessHandle
    log: Path
    epoch: int = 0
    """The epoch of its group; 0 for an engine that has the whole model."""
    memory_bytes: int = 0
    """The memory that the proof grants it."""


class EnginesPort(Protocol):
    """The port to the engines of one node."""

    def start(self, order: EngineOrder, taken: Collection[EngineAddress]) -> EngineProcess:
        """Start an engine at an address that is not in `taken`.

        Raises:
            OSError: it cannot be started.

        """
        ...

    def last_epoch(self, replica: str, uid: str) -> int:
        """Return the last epoch for which a rank of the replica was started here; 0 if none was."""
        ...

    def find(self) -> list[EngineProcess]:
        """Return the engines that an earlier run of this agent left running."""
        ...


class EpochRecords:
    """The last epoch of each replica, on disk, so that a rank of an epoch is started once only."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the agent's engines."""
        self._folder = folder

    def use(self, replica: str, uid: str, epoch: int) -> None:
        """Record that a rank of the epoch is about to start. Raises OSError."""
        text = json.dumps({"uid": uid, "epoch": epoch})
        write_atomically(self._folder / replica / _EPOCH_FILE, text)

    def last(self, replica: str, uid: str) -> int:
        """Return the last epoch of this very replica; 0 if there was none."""
        try:
            tree = json.loads((self._folder / replica / _EPOCH_FILE).read_text())
            return int(tree["epoch"]) if tree["uid"] == uid else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0


def place(
    order: EngineOrder,
    *,
    node: str,
    address: EngineAddress,
    identity_dir: Path | None = None,
    prefixes: Path | None = None,
) -> EngineConfig:
    """Return the configuration of an engine at an address of the node; a port serves TLS with the identity in the folder.

    `prefixes` is the folder of all deployments' cached prompts.
    """
    changes: dict[str, object] = {"node": node, "url": address.url}
    if identity_dir is not None and not address.socket:
        changes["identity_dir"] = identity_dir
        changes["url"] = address._replace(node=node).url
    if prefixes is not None and order.config.kv_cache.disk_bytes is not None:
        changes["prefix_disk_dir"] = prefix_folders.folder_of(prefixes, order.deployment)
    return order.config.model_copy(update=changes)


class StoppedError(OSError):
    """The engines of this Mac were stopped by an order, which is still there."""


@dataclass(slots=True)
class EngineProcesses:
    """The engines below one agent's state folder (`EnginesPort`)."""

    folder: Path
    _: KW_ONLY
    node: str
    addresses: EngineAddresses
    identity_dir: Path | None = None
    """Folder of the node's identity, with which engines on ports serve TLS."""
    prefixes: Path | None = None
    """Folder of cached prompts."""
    stopped: Callable[[], str] = lambda: ""
    """Returns that an order stopped the engines of this Mac, or ""."""
    refusal: Callable[[], str] = lambda: ""
    """Returns why no engine can start now, or ""."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables of their environment."""
    _epochs: EpochRecords = field(init=False)

    def __post_init__(self) -> None:
        """Read the epochs below the folder."""
        self._epochs = EpochRecords(self.folder)

    def last_epoch(self, replica: str, uid: str) -> int:
        """Return the last epoch for which a rank of the replica was started here; 0 if none was."""
        return self._epochs.last(replica, uid)

    def start(self, order: EngineOrder, taken: Collection[EngineAddress]) -> EngineProcess:
        """Start an engine at a free address; this uses up a rank's epoch, even if the start fails.

        Raises:
            StoppedError: an order stopped the engines of this Mac.
            OSError: there is no free address, no process, no disk space, too low a limit of open files, or no Metal.

        """
        stopped = self.stopped()
        if stopped:
            raise StoppedError(stopped)
        refusal = self.refusal()
        if refusal:
            raise OSError(refusal)
        launch, folder = order.launch, self.folder / order.config.replica
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        if launch is not None:
            self._epochs.use(order.config.replica, order.config.replica_uid, launch.group.epoch)
        folder.mkdir(parents=True, exist_ok=True)
        # While the store is away, gateways know only that one. Raises OSError.
        file = folder / _ADDRESS_FILE
        address = self.addresses.free(taken, earlier=read_text(file)[:1024])
        write_atomically(file, address.url)
        config = place(
            order,
            node=self.node,
            address=address,
            identity_dir=self.identity_dir,
            prefixes=self.prefixes,
        )
        variables = environment.child_environment(self.variables, without=())
        if launch is not None:
            group_launch.write_group_files(launch, folder)
            variables = environment.child_environment(
                {**self.variables, **group_launch.group_variables(launch, folder)},
                without=group_launch.CLEARED_VARIABLES,
            )
        child = processes.spawn(
            [sys.executable, "-m", engine_config.MODULE, *config.identity.to_argv()],
            log=engine_logs.new_run(folder),
            cwd=folder,
            environment=variables,
            stdin=config.to_json(),
        )
        return _engine_process(config.identity, child, folder)

    def find(self) -> list[EngineProcess]:
        """Return the engines that an earlier run of this agent left running."""
        return find_engines(self.folder)


def find_engines(folder: Path | None) -> list[EngineProcess]:
    """Return the engines below an agent's folder of engines, of whatever release and address; None for all agents'."""
    engines = None if folder is None else folder.resolve()
    found = (_adopt(process, engines) for process in psutil.process_iter())
    return [engine for engine in found if engine is not None]


def _adopt(process: psutil.Process, engines: Path | None) -> EngineProcess | None:
    try:
        argv = process.cmdline()
        identity = EngineIdentity.from_argv(argv)
        if identity is None or process.status() == psutil.STATUS_ZOMBIE:
            return None
        folder = Path(process.cwd())
        start = process_start(process.pid)
    # Before 7.2.1 psutil raises a plain OSError for command lines on macOS (psutil#2709).
    except (psutil.Error, OSError):
        return None
    if engines is not None and folder.parent.resolve() != engines:
        return None
    record = processes.ProcessRecord(pid=process.pid, start=start, command=tuple(argv))
    return _engine_process(identity, processes.ChildProcess(record, None), folder)


def _engine_process(
    identity: EngineIdentity, child: processes.ProcessHandle, folder: Path
) -> EngineProcess:
    return EngineProcess(
        replica=identity.replica,
        replica_uid=identity.uid,
        served_name=identity.model,
        address=identity.address,
        child=child,
        log=folder / engine_logs.LOG_FILE,
        epoch=identity.epoch,
        memory_bytes=identity.memory,
    )


def check_open_files(hard_limit: int) -> None:
    """Check the hard limit of open files, which engines inherit. Raises OSError: it is too low for an engine."""
    if hard_limit != resource.RLIM_INFINITY and hard_limit < _MIN_OPEN_FILES:
        raise OSError(
            f"the agent may open {hard_limit} files at most, and an engine needs {_MIN_OPEN_FILES}; start the agent with "
            f"a higher hard limit (ulimit -H -n, LimitNOFILE= of systemd, HardResourceLimits of launchd)"
        )


def ask_to_stop(engine: EngineProcess) -> None:
    """Ask the engine to drain and end (SIGTERM)."""
    engine.child.send(signal.SIGTERM)


def kill(engine: EngineProcess) -> None:
    """Kill the engine (SIGKILL)."""
    engine.child.send(signal.SIGKILL)


def end_references(folder: Path) -> None:
    """Kill the processes below an agent's folder that answer the golden question (nodeagent/engines/references.py)."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_reference = engine_config.is_golden(process.cmdline())
            if is_reference and Path(process.cwd()).parent.resolve() == folder.resolve():
                process.kill()


async def stop_all(folder: Path, clock: Clock, *, grace_s: float) -> int:
    """Stop every engine below an agent's folder, each after at most `grace_s`; return their number."""
    end_references(folder)
    engines = find_engines(folder)
    for engine in engines:
        ask_to_stop(engine)
    async with asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(processes.end(engine.child, clock, grace_s=grace_s))
    return len(engines)
