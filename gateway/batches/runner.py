"""Runs the requests of batches while Macs are idle. Of the gateways that share a folder, one runs.

Each result is on the disk before the next request takes its place; a request without one runs again after a crash.
"""

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import orjson

from gateway.auth.keyring import Principal
from gateway.batches import internal_request, records
from gateway.batches.database import (
    COMPLETED,
    FAILED,
    BatchStore,
    DuplicateIdError,
)
from gateway.batches.records import BatchLine, LineError, StoredBatch, StoredFile
from gateway.forwarding.model_state import ModelStates
from gateway.forwarding.router import LoadTracker
from gateway.handler import InferenceHandler
from gateway.routing.table import EngineEndpoint, ServedModel
from gateway.state.fleet_state import FleetState
from machinery import files
from machinery.backoff import Backoff, Retries
from machinery.sqlite_file import DatabaseError
from schemas.wire.errors import RefusedError

log = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_IDLE_TICK_S: Final = 2.0
# Another gateway of this machine runs the batches; it may die.
_LOCK_RETRY_S: Final = 2.0
_LINES_AT_ONCE: Final = 64
_READ_BYTES: Final = records.MAX_LINE_BYTES + 1
_MOST_ATTEMPTS: Final = 6
_BACKOFF: Final = Backoff(first_s=1.0, limit_s=60.0)
GONE_KEY_S: Final = 3600.0
"""Seconds after which what belonged to a deleted key goes: a store that is being restored has no keys for a while."""
_GONE_CHECK_S: Final = 60.0
# Clients waited a moment ago: they come in waves.
_YIELD_S: Final = 5.0
_RETRIED: Final = frozenset({429, 500, 502, 503, 504})
_DISK_ERRORS: Final = (DatabaseError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGateway:
    """The parts of the gateway that serve the requests of batches."""

    handler: InferenceHandler
    fleet_state: FleetState
    load_tracker: LoadTracker
    model_states: ModelStates


@dataclass(slots=True, eq=False)
class _Run:
    """A request under way."""

    batch: StoredBatch
    line: BatchLine
    task: asyncio.Task[None]


@dataclass(slots=True)
class _Retry:
    """A line, or a batch, that failed and waits."""

    attempts: int = 0
    not_before_s: float = 0.0

    def delay(self, now_s: float) -> None:
        """Count a failure, and wait longer after each."""
        self.attempts += 1
        self.not_before_s = now_s + _BACKOFF.delay_s(self.attempts, jitter=random.random())


class BatchRunner:
    """Runs batches. Run `run()` in a task group."""

    def __init__(
        self, store: BatchStore, gateway: BatchGateway, *, gone_key_s: float = GONE_KEY_S
    ) -> None:
        self.store = store
        responses = gateway.handler.responses.database
        self._owned = (store,) if responses is None else (store, responses)
        self._gateway = gateway
        self._clock = gateway.handler.clock
        self._runs: dict[tuple[str, int], _Run] = {}
        self._retries: dict[tuple[str, int], _Retry] = {}
        self._delayed: dict[str, _Retry] = {}
        self._yielded_until_s: dict[str, float] = {}
        self._gone_since_s: dict[str, float] = {}
        """Owners whose key is gone."""
        self._gone_key_s, self._gone_check_s = gone_key_s, 0.0

    async def run(self) -> None:
        """Take the lock of the folder, and run its batches forever; a broken disk stops no gateway."""
        retries = Retries(_BACKOFF, self._clock)
        while True:
            try:
                with _runner_lock(self.store) as is_ours:
                    if is_ours:
                        await asyncio.to_thread(self.store.delete_leftovers, self._clock.now())
                        retries.reset()
                        await self._run_batches()
                await self._clock.sleep(_LOCK_RETRY_S)
            except _DISK_ERRORS as error:
                log.warning("cannot use the folder of batches", extra={"why": str(error)})
                await retries.wait()

    async def _run_batches(self) -> None:
        retries = Retries(_BACKOFF, self._clock)
        try:
            while True:
                try:
                    is_busy = await self._tick()
                except _DISK_ERRORS as error:
                    log.warning("cannot use the folder of batches", extra={"why": str(error)})
                    await retries.wait()
                    continue
                retries.reset()
                await self._clock.sleep(_TICK_S if is_busy else _IDLE_TICK_S)
        finally:
            runs, self._runs = tuple(self._runs.values()), {}
            for run in runs:
                run.task.cancel()
            await asyncio.gather(*(run.task for run in runs), return_exceptions=True)

    async def _tick(self) -> bool:
        """Take each open batch a step further; return whether there is one."""
        if not self._gateway.fleet_state.table_cache.is_synced:
            return False
        await self._delete_gone()
        batches = await asyncio.to_thread(self.store.open_batches)
        open_ids = {batch.id for batch in batches}
        self._retries = {at: one for at, one in self._retries.items() if at[0] in open_ids}
        self._delayed = {at: one for at, one in self._delayed.items() if at in open_ids}
        gateway, now_s = self._gateway, self._clock.monotonic()
        waiting = gateway.model_states.waiting()
        for name in {run.line.model for run in self._runs.values()}:
            model = gateway.fleet_state.table_cache.table.models.get(name)
            own = [run for run in self._runs.values() if run.line.model == name]
            is_crowded = model is not None and any(
                gateway.load_tracker.is_overbooked(endpoint) for endpoint in _endpoints(model)
            )
            if waiting.get(name, 0) or is_crowded:
                self._yielded_until_s[name] = now_s + _YIELD_S
                for run in own:
                    run.task.cancel()
        for batch in batches:
            await self._try_step(batch)
        return bool(batches)

    async def _delete_gone(self) -> None:
        """Delete what belonged to keys that have been gone for long."""
        gateway, now_s = self._gateway, self._clock.monotonic()
        if now_s < self._gone_check_s or not gateway.fleet_state.key_cache.is_current():
            return
        self._gone_check_s = now_s + min(_GONE_CHECK_S, self._gone_key_s)
        owners = [await asyncio.to_thread(store.owners) for store in self._owned]
        gone = set[str]().union(*owners) - gateway.fleet_state.keyring.identities() - {""}
        self._gone_since_s = {one: self._gone_since_s.get(one, now_s) for one in gone}
        for owner, since_s in self._gone_since_s.items():
            if now_s - since_s >= self._gone_key_s:
                for store in self._owned:
                    await asyncio.to_thread(store.delete_owner, owner)
                log.info(
                    "deleted the files, batches and responses of a deleted key",
                    extra={"key": owner},
                )

    async def _try_step(self, batch: StoredBatch) -> None:
        """Take a batch a step further. One that the disk has no room for waits, and holds up no other."""
        delay = self._delayed.get(batch.id, _Retry())
        if self._clock.monotonic() < delay.not_before_s:
            return
        try:
            await self._step(batch)
            self._delayed.pop(batch.id, None)
        except _DISK_ERRORS as error:
            why = {"batch": batch.id, "why": str(error)}
            log.warning("cannot take a batch further", extra=why)
            delay.delay(self._clock.monotonic())
            self._delayed[batch.id] = delay

    async def _step(self, batch: StoredBatch) -> None:
        now_s = int(self._clock.now().timestamp())
        if batch.status == "validating":
            await asyncio.to_thread(self._validate, batch, now_s)
        elif batch.status == "cancelling":
            await self._end(batch, "cancelled", now_s)
        elif batch.status == "finalizing":
            await self._end(batch, "completed", now_s)
        elif now_s >= batch.expires_s:
            await self._end(batch, "expired", now_s)
        elif batch.completed + batch.failed >= batch.total:
            record = msgspec.structs.replace(batch, status="finalizing", finalizing_s=now_s)
            await asyncio.to_thread(self.store.change_batch, batch, record)
        else:
            await self._start_lines(batch)

    def _validate(self, batch: StoredBatch, now_s: int) -> None:
        """Read the input, and begin or fail the batch. Blocks."""
        lines, errors = _read_input(self.store, batch)
        if not errors:
            started = msgspec.structs.replace(
                batch, status="in_progress", in_progress_s=now_s, total=len(lines)
            )
            try:
                self.store.change_batch(batch, started, lines)
            except DuplicateIdError as error:
                message = f"'{error}' is the custom_id of two lines; each needs its own."
                errors = [LineError(code="duplicate_custom_id", message=message, param="custom_id")]
        if errors:
            failed = msgspec.structs.replace(batch, status="failed", ended_s=now_s)
            self.store.change_batch(batch, failed.with_errors(errors))

    async def _start_lines(self, batch: StoredBatch) -> None:
        limit = _LINES_AT_ONCE + len(self._runs)
        lines = await asyncio.to_thread(self.store.waiting_lines, batch.id, limit)
        now_s = self._clock.monotonic()
        for line in lines:
            at = (batch.id, line.number)
            retry = self._retries.get(at)
            is_due = retry is None or now_s >= retry.not_before_s
            if at not in self._runs and is_due and self._has_room(line.model):
                task = asyncio.get_running_loop().create_task(self._run_line(batch, line))
                self._runs[at] = _Run(batch, line, task)

    def _has_room(self, name: str) -> bool:
        """Return whether a Mac of the model is idle, apart from requests of batches."""
        gateway = self._gateway
        model = gateway.fleet_state.table_cache.table.models.get(name)
        if model is None:
            return True  # the refusal is the result
        own = sum(run.line.model == name for run in self._runs.values())
        if self._clock.monotonic() < self._yielded_until_s.get(name, 0.0):
            return False
        endpoints = _endpoints(model)
        if not endpoints:
            return own == 0  # one request starts a deployment that is scaled to zero
        health = gateway.load_tracker.health(self._clock.monotonic())
        others = sum(
            health.in_flight.get(endpoint.origin, 0)
            + health.others_in_flight.get(endpoint.origin, 0.0)
            for endpoint in endpoints
        )
        foreign = max(0.0, others - own)
        idle = sum(endpoint.concurrency for endpoint in endpoints[int(foreign) :])
        return own < idle

    async def _run_line(self, batch: StoredBatch, line: BatchLine) -> None:
        at = (batch.id, line.number)
        try:
            status, answer, request_id = await self._answer(batch, line)
            retry = self._retries.setdefault(at, _Retry())
            retry.delay(self._clock.monotonic())
            if status in _RETRIED and retry.attempts < _MOST_ATTEMPTS:
                return
            try:
                body: object = orjson.Fragment(answer) if orjson.loads(answer) is not None else None
            except orjson.JSONDecodeError:
                body = answer[:1000].decode(errors="replace")
            response = {"status_code": status, "request_id": request_id, "body": body}
            head = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id}
            result = orjson.dumps({**head, "response": response, "error": None})
            state = COMPLETED if status < 400 else FAILED
            await asyncio.to_thread(self.store.end_line, batch, line.number, state, result)
            self._retries.pop(at, None)
        except DatabaseError as error:
            # The request runs again once the disk has room.
            log.warning("cannot write a result of a batch", extra={"why": str(error)})
            self._yielded_until_s[line.model] = self._clock.monotonic() + _BACKOFF.limit_s
        except RefusedError:
            # The bodies of clients come first; the request runs once they leave memory for its own.
            self._yielded_until_s[line.model] = self._clock.monotonic() + _YIELD_S
        finally:
            self._runs.pop(at, None)

    async def _answer(self, batch: StoredBatch, line: BatchLine) -> tuple[int, bytes, str]:
        """Return status, body and request id of the answer to a line. Raises RefusedError: no memory for its body."""
        principal: Principal | None = None
        try:
            body = await asyncio.to_thread(_body_of, self.store, batch, line)
        except OSError as error:  # too many open files, for one, which passes
            return 503, _error(f"The input file of the batch cannot be read: {error}"), ""
        except msgspec.MsgspecError as error:
            return 400, _error(f"The input file of the batch is damaged: {error}"), ""
        if batch.owner or self._gateway.fleet_state.access.is_on:
            principal = self._gateway.fleet_state.keyring.owner(batch.owner)
            if principal is None:
                name = batch.owner.partition(" ")[0]
                message = f"The API key '{name}' of this batch exists no longer, or has expired."
                return 401, _error(message), ""
        handler, request_id = self._gateway.handler, f"{batch.id}-{line.number}"
        request = internal_request.start(handler, principal, batch.endpoint, body, request_id)
        return *await request.answer(), request_id

    async def _end(self, batch: StoredBatch, status: records.BatchStatus, now_s: int) -> None:
        """End a batch: stop its requests, write its files, forget its lines."""
        own = [run for run in self._runs.values() if run.batch.id == batch.id]
        for run in own:
            run.task.cancel()
        await asyncio.gather(*(run.task for run in own), return_exceptions=True)
        await asyncio.to_thread(self._finish, batch, status, now_s)

    def _finish(self, batch: StoredBatch, status: records.BatchStatus, now_s: int) -> None:
        """Write the files of a batch and end it. Blocks. After a crash in between it is done again."""
        stored_batch = self.store.batch(batch.id, batch.owner) or batch
        undone: list[BatchLine] = []
        if status == "expired":
            undone = self.store.waiting_lines(batch.id, records.MAX_LINES)
        output = _write_results(self.store, stored_batch, COMPLETED, now_s)
        errors = _write_results(
            self.store, stored_batch, FAILED, now_s, [_expired(line) for line in undone]
        )
        ended = msgspec.structs.replace(
            stored_batch,
            status=status,
            ended_s=now_s,
            output_file=output,
            error_file=errors,
            failed=stored_batch.failed + len(undone),
        )
        self.store.change_batch(stored_batch, ended)
        self.store.drop_lines(batch.id)


def _endpoints(model: ServedModel) -> tuple[EngineEndpoint, ...]:
    endpoints = {
        endpoint.origin: endpoint for backend in model.backends for endpoint in backend.leased
    }
    return tuple(endpoints.values())


@contextlib.contextmanager
def _runner_lock(store: BatchStore) -> Iterator[bool]:
    """Hold the lock of the folder; yield False if another process has it."""
    descriptor = os.open(store.folder / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _read_input(store: BatchStore, batch: StoredBatch) -> tuple[list[BatchLine], list[LineError]]:
    """Return the requests in the input file of a batch, and its errors. Blocks."""
    lines: list[BatchLine] = []
    errors: list[LineError] = []
    offset = 0
    try:
        with store.content(batch.input_file).open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_READ_BYTES), b""), 1):
                if number > records.MAX_LINES or len(raw) == _READ_BYTES:
                    what = f"{records.MAX_LINES} lines of {records.MAX_LINE_BYTES} bytes"
                    message = f"A batch has at most {what}."
                    return [], [LineError(code="too_large", message=message, line=number)]
                found = records.read_line(raw, batch.endpoint) if raw.strip() else None
                if isinstance(found, LineError):
                    errors.append(msgspec.structs.replace(found, line=number))
                elif found is not None:
                    lines.append(BatchLine(number, found[0], offset, len(raw), found[1]))
                offset += len(raw)
    except OSError as error:
        message = f"The input file cannot be read: {error.strerror}."
        errors.append(LineError(code="file_unreadable", message=message))
    if not lines and not errors:
        errors.append(LineError(code="empty_file", message="The input file has no requests."))
    return lines, errors


def _body_of(store: BatchStore, batch: StoredBatch, line: BatchLine) -> bytes:
    with store.content(batch.input_file).open("rb") as file:
        file.seek(line.offset)
        return records.request_body(file.read(line.length))


def _error(message: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": "invalid_request_error"}})


def _expired(line: BatchLine) -> bytes:
    error = {"code": "batch_expired", "message": "The batch ended before this request ran."}
    head = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id}
    return orjson.dumps({**head, "response": None, "error": error})


def _write_results(
    store: BatchStore, batch: StoredBatch, state: int, now_s: int, more: Iterable[bytes] = ()
) -> str | None:
    """Write the results in a state as a file; return its id, None if there are none. Blocks."""
    # Derived from the batch, so that a crash between two steps leaves no second file.
    file_id = (
        f"file-{batch.id.removeprefix('batch_')}-{'output' if state == COMPLETED else 'errors'}"
    )
    size = 0
    with files.open_replacement(store.content(file_id)) as file:
        for result in itertools.chain(store.results(batch.id, state), more):
            size += file.write(result + b"\n")
    if not size:
        store.content(file_id).unlink()
        return None
    suffix = "output" if state == COMPLETED else "error"
    store.add_file(
        StoredFile(
            id=file_id,
            owner=batch.owner,
            filename=f"{batch.id}_{suffix}.jsonl",
            purpose="batch_output",
            size=size,
            created_s=now_s,
        )
    )
    return file_id
