"""The route that gives files of models to other agents: `GET /v1/blobs/<digest>`, with Range.

Only a node's certificate opens it. The path on the disk is made of hexadecimal digits alone. A partial file gives what
has been received of it; the reader verifies the whole by its digest.
"""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from identity.names import Role
from identity.peers import peer_of
from machinery.http_server import SSL_OBJECT
from models.hub.digests import BlobDigest
from models.hub.threads import acquire_in_thread, run_in_thread
from models.model_store.blob_reader import OpenBlob, open_blob, parse_hex
from models.model_store.store import ModelStore
from nodeagent.peers.uploads import Uploads
from schemas.wire.blobs import PATH, RECEIVED
from schemas.wire.errors import Refusal, RefusedError

_READ_BYTES: Final = 1 << 20
# One range: other forms may be ignored, and the whole file is sent (RFC 9110, section 14.2).
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRoutes:
    """The route of one agent's files, and its authorization."""

    node: str
    store: ModelStore
    uploads: Uploads
    piece_lists: Mapping[str, bytes] = field(default_factory=dict)
    """Lists of pieces that the node offers, by their SHA-256."""

    def add_to(self, app: FastAPI) -> None:
        """Add the route to the agent's API."""
        app.add_api_route(f"{PATH}/{{digits}}", self.get, methods=["GET", "HEAD"])

    async def get(self, request: Request, digits: str) -> Response:
        """Stream a file, or a range of it, to another agent."""
        # Refuse all but agents of this fleet. Raises RefusedError.
        peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
        if peer is None or peer.identity.role is not Role.NODE:
            raise self._refused(403, "only agents with a certificate of the fleet get files")
        if digits in self.piece_lists:
            return Response(self.piece_lists[digits], media_type="application/json")
        digest = parse_hex(digits)
        if digest is None:
            raise self._refused(404, "there is no such file")
        if not self.uploads.enter():
            raise self._refused(
                429, f"{self.uploads.most} files are being sent already; ask another node"
            )
        return await self.respond(request, digest, {"cache-control": "no-store"})

    async def respond(
        self, request: Request, digest: BlobDigest, headers: Mapping[str, str]
    ) -> Response:
        """Return the response with a file, or a range of it; the caller has taken a place of `uploads` for it.

        `headers` are those of the answer beside the ones of the body.

        Raises:
            RefusedError: the file, or the range of it, is not here.

        """
        try:
            return self._response(
                request, await acquire_in_thread(lambda: open_blob(self.store, digest)), headers
            )
        except BaseException:
            self.uploads.leave()
            raise

    def _response(
        self, request: Request, blob: OpenBlob | None, more: Mapping[str, str]
    ) -> Response:
        if blob is None:
            raise self._refused(404, "there is no such file")
        found = _RANGE.fullmatch(request.headers.get("range", ""))
        if found is None and not blob.is_whole:
            blob.close()
            raise self._refused(404, "the file is not whole here; ask for a range")
        start = int(found[1]) if found else 0
        end = min(int(found[2]) + 1 if found and found[2] else blob.available, blob.available)
        total = str(blob.available) if blob.is_whole else "*"
        headers = {**more, "accept-ranges": "bytes", RECEIVED: str(blob.received)}
        if found and start >= end:
            blob.close()
            raise self._refused(
                416,
                f"byte {start} is not here; {blob.available} bytes are",
                (b"content-range", f"bytes */{total}".encode()),
                (RECEIVED.encode(), headers[RECEIVED].encode()),
            )
        headers["content-length"] = str(end - start)
        if found:
            headers["content-range"] = f"bytes {start}-{end - 1}/{total}"
        return _BlobResponse(
            _Upload(blob, self.uploads, start, end, _local_address(request)),
            request.method,
            found,
            headers,
        )

    def _refused(self, status: int, message: str, *extra: tuple[bytes, bytes]) -> RefusedError:
        text = f"{self.node}: {message}"
        return RefusedError(
            Refusal(status=status, message=text, type="refused", extra_headers=extra)
        )


@dataclass(slots=True)
class _Upload:
    blob: OpenBlob
    uploads: Uploads
    start: int
    end: int
    address: str
    """The local one, which tells the network."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes as the limit allows; end early if the file became shorter."""
        while self.start < self.end:
            count = min(_READ_BYTES, self.end - self.start)
            await self.uploads.take(count, self.address)
            piece = await run_in_thread(self.blob.read, self.start, count)
            if not piece:
                return
            self.start += len(piece)
            self.uploads.count(len(piece))
            yield piece


def _local_address(request: Request) -> str:
    server = request.scope.get("server")
    return str(server[0]) if server else ""


class _BlobResponse(StreamingResponse):
    """A response that streams a file; it closes the file and leaves its place at its end."""

    def __init__(
        self, upload: _Upload, method: str, found: re.Match[str] | None, headers: dict[str, str]
    ) -> None:
        super().__init__(
            upload.pieces() if method == "GET" else _nothing(),
            status_code=206 if found else 200,
            media_type="application/octet-stream",
            headers=headers,
        )
        self._upload = upload

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._upload.blob.close()
            self._upload.uploads.leave()


async def _nothing() -> AsyncIterator[bytes]:
    yield b""
