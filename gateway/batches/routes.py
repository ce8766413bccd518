"""`/v1/files` and `/v1/batches`, as OpenAI's API has them; each API key sees its own."""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import IO, Annotated, Final, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from gateway import errors
from gateway.apis.http_bodies import json_response, read_body, read_parts
from gateway.auth.access_control import owner_of
from gateway.batches import records
from gateway.batches.database import BatchStore
from gateway.batches.records import StoredBatch, StoredFile
from gateway.disk_calls import off_loop
from machinery import files
from machinery.clock import Clock
from schemas.wire.errors import Refusal, RefusedError, invalid

_T = TypeVar("_T")
MAX_FILE_BYTES: Final = 200 << 20
MAX_OWNER_BYTES: Final = 2 << 30
MAX_BYTES: Final = 20 << 30
_MAX_OPEN_BATCHES: Final = 100
# The disk of a Mac has more important uses.
_RESERVE_BYTES: Final = 2 << 30
_DISK_CHECK_BYTES: Final = 16 << 20
# Of a field of the form that is no file.
_FIELD_LIMIT: Final = 4 << 10
# RFC 2046, 5.1.1.
_BOUNDARY_LIMIT: Final = 70
_SPOOLED_BYTES: Final = 1 << 20
_READ_BYTES: Final = 64 << 10


class _BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


_BATCH: Final = msgspec.json.Decoder(_BatchBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRoutes:
    """Route handlers, one method for each route."""

    store: BatchStore | None
    """None: this gateway keeps no batches."""
    clock: Clock
    new_id: Callable[[], str] = lambda: secrets.token_hex(12)
    """Makes names that no other gateway makes."""
    uploads: dict[str, int] = field(default_factory=dict)
    """Bytes received of the uploads in progress, by owner: one at a time of each."""

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the application."""
        app.add_api_route("/v1/files", self.upload, methods=["POST"])
        app.add_api_route("/v1/files", self.list_files, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.file, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.delete_file, methods=["DELETE"])
        app.add_api_route("/v1/files/{file_id}/content", self.content, methods=["GET"])
        app.add_api_route("/v1/batches", self.create, methods=["POST"])
        app.add_api_route("/v1/batches", self.list_batches, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}", self.batch, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"])

    async def upload(self, request: Request) -> Response:
        """Take a file of requests, as multipart/form-data."""
        store, owner = self._store(), owner_of(request)
        slot = owner or (request.client.host if request.client else "")
        if slot in self.uploads:
            raise RefusedError(errors.too_many_uploads())
        self.uploads[slot] = 0
        try:
            with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as spool:
                async for part in self._parts(request, store, owner, slot):
                    await off_loop(spool.write, part)
                file, purpose = await off_loop(_read_form, request.headers, spool)
            with file.file:
                if purpose != "batch":
                    raise invalid(
                        '"purpose" must be "batch": files serve batches alone.', "purpose"
                    )
                record = StoredFile(
                    id=f"file-{self.new_id()}",
                    owner=owner,
                    filename=(file.filename or "batch.jsonl")[:255],
                    purpose=purpose,
                    size=file.size or 0,
                    created_s=self._now_s(),
                )
                await off_loop(_keep, store, record, file)
        finally:
            del self.uploads[slot]
        return json_response(record.body())

    async def _parts(
        self, request: Request, store: BatchStore, owner: str, slot: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield the parts of an upload for as long as there is room for them."""
        used, own = await off_loop(lambda: (store.used_bytes(), store.used_bytes(owner)))
        checked = 0
        async for part in read_parts(request, MAX_FILE_BYTES):
            self.uploads[slot] = size = self.uploads[slot] + len(part)
            if used + sum(self.uploads.values()) > MAX_BYTES or own + size > MAX_OWNER_BYTES:
                raise RefusedError(
                    errors.no_room_for_files("The files of batches have their limit")
                )
            if size >= checked:
                checked = size + _DISK_CHECK_BYTES
                free = await off_loop(lambda: shutil.disk_usage(store.folder).free)
                if free < _RESERVE_BYTES + checked:
                    raise RefusedError(
                        errors.no_room_for_files("The gateway's disk is nearly full")
                    )
            yield part

    async def list_files(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> Response:
        """List the newest files."""
        store, owner = self._store(), owner_of(request)
        return _listing([file.body() for file in await off_loop(store.files, owner, limit)])

    async def file(self, file_id: str, request: Request) -> Response:
        """Describe a file."""
        return json_response((await self._file(file_id, request)).body())

    async def content(self, file_id: str, request: Request) -> Response:
        """Return the content of a file."""
        record = await self._file(file_id, request)
        path = self._store().content(record.id)
        result = await off_loop(path.stat)
        return FileResponse(path, stat_result=result, media_type="application/jsonl")

    async def delete_file(self, file_id: str, request: Request) -> Response:
        """Delete a file that no open batch needs."""
        store, record = self._store(), await self._file(file_id, request)
        if await off_loop(store.is_needed, record):
            raise invalid("A batch that is not over reads this file; cancel it first.", "file_id")
        await off_loop(store.delete_file, record)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        """Begin a batch."""
        store, owner = self._store(), owner_of(request)
        try:
            given = _BATCH.decode(await read_body(request))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"{str(error)[:200]}.") from error
        if given.endpoint not in records.ENDPOINTS:
            known = ", ".join(records.ENDPOINTS)
            raise invalid(f'"endpoint" must be one of {known}.', "endpoint")
        if given.completion_window != records.WINDOW:
            raise invalid(f'"completion_window" must be "{records.WINDOW}".', "completion_window")
        metadata = given.metadata or {}
        if len(metadata) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in metadata.items()):
            raise invalid('"metadata" has at most 16 pairs, of 64 and 512 characters.', "metadata")
        await self._file(given.input_file_id, request, param="input_file_id")
        running = [batch for batch in await off_loop(store.open_batches) if batch.owner == owner]
        if len(running) >= _MAX_OPEN_BATCHES:
            raise RefusedError(errors.too_many_batches(_MAX_OPEN_BATCHES))
        record = StoredBatch(
            id=f"batch_{self.new_id()}",
            owner=owner,
            endpoint=given.endpoint,
            input_file=given.input_file_id,
            status="validating",
            created_s=self._now_s(),
            metadata=given.metadata,
        )
        await off_loop(store.add_batch, record)
        return json_response(record.body())

    async def list_batches(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str = ""
    ) -> Response:
        """List the newest batches, or those before one."""
        store, owner = self._store(), owner_of(request)
        batches = await off_loop(store.batches, owner, 10_000)
        ids = [batch.id for batch in batches]
        start = ids.index(after) + 1 if after in ids else 0
        page = [batch.body() for batch in batches[start : start + limit]]
        return _listing(page, has_more=len(batches) > start + limit)

    async def batch(self, batch_id: str, request: Request) -> Response:
        """Describe a batch."""
        store, owner = self._store(), owner_of(request)
        return json_response(_found(await off_loop(store.batch, batch_id, owner), batch_id).body())

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """End a batch; the results until then become its files."""
        store, owner = self._store(), owner_of(request)
        batch = await off_loop(store.cancel, batch_id, owner, self._now_s())
        return json_response(_found(batch, batch_id).body())

    def _store(self) -> BatchStore:
        """Return the folder.

        Raises:
            RefusedError: this gateway has none.

        """
        if self.store is None:
            raise RefusedError(errors.no_batches())
        return self.store

    async def _file(self, file_id: str, request: Request, *, param: str = "id") -> StoredFile:
        file = await off_loop(self._store().file, file_id, owner_of(request))
        return _found(file, file_id, param=param)

    def _now_s(self) -> int:
        return int(self.clock.now().timestamp())


def _found(found: _T | None, name: str, *, param: str = "id") -> _T:
    if found is None:
        message = f"There is no '{name[:100]}'; other keys' files and batches are not shown."
        raise RefusedError(Refusal(status=404, message=message, param=param, code="not_found"))
    return found


def _read_form(headers: Headers, spool: IO[bytes]) -> tuple[UploadFile, str]:
    """Return the file, which is on the disk if it is large, and its purpose. Takes seconds for a large form.

    The parser gets a content type of ours: it decodes texts with the codec that the client names.
    """
    kind, options = parse_options_header(headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        raise invalid("Send the file as multipart/form-data, with the fields 'purpose' and 'file'.")
    charset = options.get(b"charset", b"utf-8").lower()
    if charset not in (b"utf-8", b"utf8"):
        raise invalid(
            f"The charset '{charset[:40].decode('latin-1')}' is not supported; send utf-8."
        )
    boundary = options.get(b"boundary", b"").decode("latin-1")
    if not 0 < len(boundary) <= _BOUNDARY_LIMIT or not boundary.isprintable() or '"' in boundary:
        raise invalid(f"The form needs a boundary of 1 to {_BOUNDARY_LIMIT} characters.")

    async def parts() -> AsyncGenerator[bytes, None]:
        spool.seek(0)
        while part := spool.read(_READ_BYTES):
            yield part

    ours = Headers({"content-type": f'multipart/form-data; boundary="{boundary}"'})
    parser = MultiPartParser(ours, parts(), max_files=1, max_fields=8, max_part_size=_FIELD_LIMIT)
    try:
        form = asyncio.run(parser.parse())
    except MultiPartException as error:
        raise invalid(f"The form cannot be read: {error.message}") from error
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise invalid("The form has no field 'file' with a file.", "file")
    return file, str(form.get("purpose") or "")


def _keep(store: BatchStore, record: StoredFile, file: UploadFile) -> None:
    """Write the content of a file, and then the file. Blocks."""
    with files.open_replacement(store.content(record.id)) as target:
        file.file.seek(0)
        shutil.copyfileobj(file.file, target)
    store.add_file(record)


def _listing(data: list[records.Json], *, has_more: bool = False) -> Response:
    ids = [one["id"] for one in data]
    edges = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return json_response({"object": "list", "data": data, **edges, "has_more": has_more})
