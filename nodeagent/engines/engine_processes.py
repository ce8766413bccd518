"""Engine processes of this node: start, find again, stop, and the epochs that were used up. Knows nothing of the store.

The process table is the record: an engine's command line holds its orders, and its working folder says to which agent
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
from schemas.sampling import Performance, Sampling, UnknownParameters
from schemas.vision import Vision
from schemas.wire import engine_flags
from schemas.wire.engine_address import EngineAddress
from schemas.wire.engine_flags import EngineFlags, EngineIdentity

# mlx-lm sets this limit when it is imported, which fails below it.
_MIN_OPEN_FILES = 4096
_EPOCH_FILE = "epoch.json"
_ADDRESS_FILE = "address"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """The parameters of one engine, without its node and address; None leaves a value to the engine."""

    replica: str
    replica_uid: str
    model_dir: Path
    served_names: tuple[str, ...]
    context_length: int
    concurrency: int
    memory_limit_bytes: int
    """The memory that the proof grants this process."""
    queue_depth: int | None = None
    sampling: Sampling | None = None
    unknown_parameters: UnknownParameters = "Warn"
    performance: Performance = "OnRequest"
    vision: Vision | None = None
    kv_tokens: int | None = None
    kv_bits: int | None = None
    kv_window: int | None = None
    kv_keep: int | None = None
    prefix_cache_bytes: int | None = None
    prefix_disk_bytes: int | None = None
    deployment: str = ""
    """Its deployment, whose engines share cached prompts on the disk."""
    adapter: Path | None = None
    lora_modules: tuple[str, ...] = ()
    """NAME=FOLDER of adapters that requests choose."""
    draft_model: Path | None = None
    draft_tokens: int | None = None
    ngram_tokens: int | None = None
    mtp_tokens: int | None = None
    group: RankLaunch | None = None
    """Its place among the ranks that share the model; None for an engine that has the whole model."""


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


def flags_of(
    order: EngineOrder,
    *,
    node: str,
    address: EngineAddress,
    identity_dir: Path | None = None,
    prefixes: Path | None = None,
) -> EngineFlags:
    """Return the flags of the engine on a node; it serves TLS with the identity in the folder.

    `prefixes` is the folder of all deployments' cached prompts.
    """
    group = order.group
    is_tcp = not address.socket
    return EngineFlags(
        model_dir=order.model_dir,
        replica=order.replica,
        replica_uid=order.replica_uid,
        node=node,
        served_names=order.served_names,
        socket=None if is_tcp else Path(address.socket),
        host=address.host if is_tcp else None,
        port=address.port if is_tcp else None,
        context_length=order.context_length,
        concurrency=order.concurrency,
        memory_limit_bytes=order.memory_limit_bytes,
        queue_limit=order.queue_depth,
        sampling=order.sampling,
        # Defaults are not written: an engine of an earlier release does not know the flags.
        unknown_parameters=None if order.unknown_parameters == "Warn" else order.unknown_parameters,
        performance=None if order.performance == "OnRequest" else order.performance,
        vision=order.vision,
        kv_tokens=order.kv_tokens,
        kv_bits=order.kv_bits,
        kv_window=order.kv_window,
        kv_keep=order.kv_keep,
        prefix_cache_bytes=order.prefix_cache_bytes,
        prefix_disk_bytes=order.prefix_disk_bytes,
        prefix_disk_dir=prefix_folders.folder_of(prefixes, order.deployment)
        if prefixes is not None and order.prefix_disk_bytes
        else None,
        identity_dir=identity_dir if is_tcp else None,
        adapter=order.adapter,
        lora_modules=order.lora_modules or None,
        draft_model=order.draft_model,
        draft_tokens=order.draft_tokens,
        ngram_tokens=order.ngram_tokens,
        mtp_tokens=order.mtp_tokens,
        rank=group.rank if group is not None else None,
        world_size=group.world_size if group is not None else None,
        coordinator=group.coordinator if group is not None else None,
        epoch=group.epoch if group is not None else None,
        backend=group.backend if group is not None else None,
        parallelism=group.parallelism if group is not None else None,
        layers=(group.layers or None) if group is not None else None,
        join_timeout_s=group.join_timeout_s if group is not None else None,
    )


def engine_command(
    order: EngineOrder,
    *,
    node: str,
    address: EngineAddress,
    identity_dir: Path | None = None,
    prefixes: Path | None = None,
) -> list[str]:
    """Return the engine's command line."""
    flags = flags_of(
        order, node=node, address=address, identity_dir=identity_dir, prefixes=prefixes
    )
    return [sys.executable, "-m", engine_flags.MODULE, *flags.to_argv()]


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
        group = order.group
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        if group is not None:
            self._epochs.use(order.replica, order.replica_uid, group.epoch)
        folder = self.folder / order.replica
        folder.mkdir(parents=True, exist_ok=True)
        address = self._address(folder, taken)
        argv = engine_command(
            order,
            node=self.node,
            address=address,
            identity_dir=self.identity_dir,
            prefixes=self.prefixes,
        )
        if self.identity_dir is not None and not address.socket:
            address = address._replace(node=self.node)
        variables = environment.child_environment(self.variables, without=())
        if group is not None:
            group_launch.write_group_files(group, folder)
            variables = environment.child_environment(
                {**self.variables, **group_launch.group_variables(group, folder)},
                without=group_launch.CLEARED_VARIABLES,
            )
        secret = group.secret.encode() if group is not None else b""
        log = engine_logs.new_run(folder)
        child = processes.spawn(argv, log=log, cwd=folder, environment=variables, stdin=secret)
        return EngineProcess(
            replica=order.replica,
            replica_uid=order.replica_uid,
            served_name=order.served_names[0],
            address=address,
            child=child,
            log=log,
            epoch=group.epoch if group is not None else 0,
            memory_bytes=order.memory_limit_bytes,
        )

    def _address(self, folder: Path, taken: Collection[EngineAddress]) -> EngineAddress:
        """Return a free address, that of the replica's engine before if possible.

        While the store is away, gateways know only that one. Raises OSError.
        """
        file = folder / _ADDRESS_FILE
        address = self.addresses.free(taken, earlier=read_text(file)[:1024])
        write_atomically(file, address.url)
        return address

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
    except psutil.Error:
        return None
    if engines is not None and folder.parent.resolve() != engines:
        return None
    if not identity.served_names:
        return None
    record = processes.ProcessRecord(pid=process.pid, start=start, command=tuple(argv))
    return EngineProcess(
        replica=identity.replica,
        replica_uid=identity.replica_uid,
        served_name=identity.served_names[0],
        address=identity.address,
        child=processes.ChildProcess(record, None),
        log=folder / engine_logs.LOG_FILE,
        epoch=identity.epoch,
        memory_bytes=identity.memory_limit_bytes,
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
            is_reference = engine_flags.is_golden(process.cmdline())
            if is_reference and Path(process.cwd()).parent.resolve() == folder.resolve():
                process.kill()


async def stop_all(folder: Path, clock: Clock, *, grace_s: float) -> int:
    """Stop every engine below an agent's folder, each after at most `grace_s`; return their number."""
    end_references(folder)
    found = find_engines(folder)
    for engine in found:
        ask_to_stop(engine)
    async with asyncio.TaskGroup() as group:
        for engine in found:
            group.create_task(processes.end(engine.child, clock, grace_s=grace_s))
    return len(found)
