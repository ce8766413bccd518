"""Which epochs of groups were used up on this node, on disk: a rank of one is started once, whoever forgets it.

Engine processes of this node: start, find again, end. Knows nothing of the store.

The process table is the record: an engine's orders are its command line, and its working folder
says whose it is. So an agent that was killed at any moment, even between starting an engine and
writing that down, finds all its engines again.
"""

import argparse
import contextlib
import errno
import json
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from machinery import environment, processes
from machinery.clock import Clock
from machinery.files import write_atomically
from nodeagent.engines import engine_logs, group_launch
from nodeagent.engines.group_launch import RankLaunch

_EPOCH_FILE = "epoch.json"


class EpochRecords:
    """The last epoch of each replica, below the folder of an agent's engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def use(self, replica: str, uid: str, epoch: int) -> None:
        """Note that a rank of the epoch is about to start. Raises OSError: it could not be noted."""
        words = json.dumps({"uid": uid, "epoch": epoch})
        write_atomically(self._folder / replica / _EPOCH_FILE, words)

    def last(self, replica: str, uid: str) -> int:
        """Return the last one of this very replica; 0 if there was none."""
        try:
            tree = json.loads((self._folder / replica / _EPOCH_FILE).read_text())
            return int(tree["epoch"]) if tree["uid"] == uid else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0


_ENGINE_MODULE = "engine"
GOLDEN_MODULE = "engine.golden"
_MAX_PORTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """What an engine is started with."""

    replica: str
    replica_uid: str
    model_dir: Path
    served_names: tuple[str, ...]
    context_length: int
    concurrency: int
    memory_limit_bytes: int
    """What the memory proof promised this process."""
    queue_depth: int | None = None
    """None leaves it to the engine, like all that follows."""
    kv_bits: int | None = None
    kv_window: int | None = None
    prefix_cache_bytes: int | None = None
    adapter: Path | None = None
    draft_model: Path | None = None
    draft_tokens: int | None = None
    group: RankLaunch | None = None
    """Its place among those that share the model; None where it has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """An engine that was started, by us or by an earlier run of this agent."""

    replica: str
    replica_uid: str
    served_name: str
    port: int
    child: processes.ProcessHandle
    log: Path
    epoch: int = 0
    """The epoch of its group; 0 where there is one rank."""
    memory_bytes: int = 0
    """What the memory proof promised it."""


def engine_command(order: EngineOrder, *, node: str, host: str, port: int) -> list[str]:
    """Return the engine's command line (engine/flags.py says what it takes)."""
    names = [part for name in order.served_names for part in ("--served-name", name)]
    return [
        *(sys.executable, "-m", _ENGINE_MODULE),
        *("--model-dir", str(order.model_dir)),
        *("--replica", order.replica),
        *("--replica-uid", order.replica_uid),
        *("--node", node),
        *names,
        *("--host", host),
        *("--port", str(port)),
        *("--context-length", str(order.context_length)),
        *("--concurrency", str(order.concurrency)),
        *("--memory-limit-bytes", str(order.memory_limit_bytes)),
        *optional_flag("--queue-limit", order.queue_depth),
        *optional_flag("--kv-bits", order.kv_bits),
        *optional_flag("--kv-window", order.kv_window),
        *optional_flag("--prefix-cache-bytes", order.prefix_cache_bytes),
        *optional_flag("--adapter", order.adapter),
        *optional_flag("--draft-model", order.draft_model),
        *optional_flag("--draft-tokens", order.draft_tokens),
        *(group_launch.group_flags(order.group) if order.group is not None else ()),
    ]


def optional_flag(flag: str, value: int | Path | None) -> tuple[str, ...]:
    """Return the flag with its value; nothing where the engine is to decide."""
    return () if value is None else (flag, str(value))


class EngineProcesses:
    """The engines below one agent's state folder."""

    def __init__(self, folder: Path, *, node: str, host: str, first_port: int) -> None:
        self._folder = folder
        self._node = node
        self._host = host
        self._first_port = first_port
        self._epochs = EpochRecords(folder)

    def last_epoch(self, replica: str, uid: str) -> int:
        """Return the last epoch of which a rank was started here for the replica; 0 if none was."""
        return self._epochs.last(replica, uid)

    def start(self, order: EngineOrder, taken: Sequence[int]) -> EngineProcess:
        """Start an engine on a free port; a rank's epoch is used up by that, whatever comes of it.

        Raises:
            OSError: it cannot be started: no free port, no process, no disk.

        """
        group = order.group
        if group is not None:
            self._epochs.use(order.replica, order.replica_uid, group.epoch)
        folder = self._folder / order.replica
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port(self._host, self._first_port, taken)
        argv = engine_command(order, node=self._node, host=self._host, port=port)
        inherited: dict[str, str] | None = None
        if group is not None:
            group_launch.write_group_files(group, folder)
            added = group_launch.group_variables(group, folder)
            inherited = environment.child_environment(added, without=group_launch.CLEARED_VARIABLES)
        log = engine_logs.new_run(folder)
        child = processes.spawn(argv, log=log, cwd=folder, environment=inherited)
        return EngineProcess(
            replica=order.replica,
            replica_uid=order.replica_uid,
            served_name=order.served_names[0],
            port=port,
            child=child,
            log=log,
            epoch=group.epoch if group is not None else 0,
            memory_bytes=order.memory_limit_bytes,
        )

    def find(self) -> list[EngineProcess]:
        """Return the engines that an earlier run of this agent left running."""
        return [found for found in map(self._adopt, psutil.process_iter()) if found is not None]

    def _adopt(self, process: psutil.Process) -> EngineProcess | None:
        try:
            argv = process.cmdline()
            if _ENGINE_MODULE not in argv or process.status() == psutil.STATUS_ZOMBIE:
                return None
            folder = Path(process.cwd())
            mark = processes.process_start(process.pid)
        except psutil.Error:
            return None
        if folder.parent.resolve() != self._folder.resolve():
            return None
        orders = _parse_command(argv)
        record = processes.ProcessRecord(pid=process.pid, birthmark=mark, command=tuple(argv))
        return EngineProcess(
            replica=orders.replica,
            replica_uid=orders.replica_uid,
            served_name=orders.served_name[0],
            port=orders.port,
            child=processes.ChildProcess(record, None),
            log=folder / engine_logs.LOG_FILE,
            epoch=orders.epoch,
            memory_bytes=orders.memory_limit_bytes,
        )


def _parse_command(argv: Sequence[str]) -> argparse.Namespace:
    """Return what of an engine's command line its agent needs to go on with it."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--replica", default="")
    parser.add_argument("--replica-uid", default="")
    parser.add_argument("--served-name", action="append", default=[])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--memory-limit-bytes", type=int, default=0)
    return parser.parse_known_args(argv)[0]


def ask_to_stop(engine: EngineProcess) -> None:
    """Ask the engine to drain and end."""
    engine.child.send(signal.SIGTERM)


def kill(engine: EngineProcess) -> None:
    """End the engine now."""
    engine.child.send(signal.SIGKILL)


def end_references(folder: Path) -> None:
    """End the processes that make references below an agent's folder (nodeagent/engines/references.py) and are nobody's."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_one = GOLDEN_MODULE in process.cmdline()
            if is_one and Path(process.cwd()).parent.resolve() == folder.resolve():
                process.kill()


async def stop_all(folder: Path, clock: Clock, *, grace_s: float) -> int:
    """End every engine below an agent's folder, for good; return how many there were."""
    end_references(folder)
    found = EngineProcesses(folder, node="", host="", first_port=0).find()
    for engine in found:
        ask_to_stop(engine)
    for engine in found:
        await processes.end(engine.child, clock, grace_s=grace_s)
    return len(found)


def free_port(host: str, first: int, taken: Sequence[int]) -> int:
    """Return the lowest port from `first` that nobody listens on.

    Somebody may take it before the engine does; then the engine ends with its own exit code for
    that, and the next start tries the next port.

    Raises:
        OSError: a hundred ports in a row are taken, or the host is not this machine.

    """
    for port in range(first, first + _MAX_PORTS):
        if port in taken:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise OSError(
                    f"engines cannot listen on {host}: {error.strerror}; is it an address of this Mac?"
                ) from error
            return port
    raise OSError(f"ports {first} to {first + _MAX_PORTS - 1} on {host} are all taken")
