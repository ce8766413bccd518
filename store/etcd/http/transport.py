"""The HTTP adapter: the port's methods as calls of etcd's JSON gateway."""

from collections.abc import AsyncGenerator, Sequence

from store import reads
from store.errors import (
    CompactedError,
    ConflictError,
    LeaseLostError,
    ReplacedError,
    TooLargeError,
    UnavailableError,
)
from store.etcd import json_values
from store.etcd.adapter import IDLE_S, RENEW_S, drop_seen_changes
from store.etcd.address import EtcdAddress
from store.etcd.authentication import Authentication
from store.etcd.error_mapping import error_from_status, is_refusal
from store.etcd.http import json_api
from store.etcd.http.json_api import JsonGateway
from store.keys import prefix_end
from store.port import (
    MAX_OPERATIONS,
    Delete,
    Guard,
    KeyValue,
    Listing,
    Operation,
    ServerStatus,
    WatchBatch,
)

# For one page. A user at a terminal waits for two attempts of this.
_LIST_S = 5.0
# Signs of life of etcd without an answer to the request of a watch: as many as in the idle time.
_BEATS_TO_CONFIRM = 4


class HttpTransport:
    """`store.port.Transport` over HTTP; connects on first use."""

    def __init__(
        self,
        address: EtcdAddress,
        *,
        idle_s: float = IDLE_S,
        authentication: Authentication | None = None,
    ) -> None:
        self._route = JsonGateway(address, idle_s=idle_s, authentication=authentication)

    async def get(self, key: str) -> KeyValue | None:
        answer = await self._route.read("/kv/range", {"key": json_api.b64(key)})
        found = answer.get("kvs", ())
        return json_api.key_value(found[0]) if found else None

    async def list(self, prefix: str) -> Listing:
        return await reads.collect(lambda: self.pages(prefix))

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        range_end = json_api.b64(prefix_end(prefix))

        async def fetch(*, start: str, revision: int, limit: int) -> reads.Page:
            body: json_api.Json = {
                "key": json_api.b64(start),
                "range_end": range_end,
                "limit": limit,
                "revision": str(revision),
            }
            answer = await self._route.read("/kv/range", body, limit_s=_LIST_S, tries=2)
            return reads.Page(
                items=tuple(json_api.key_value(tree) for tree in answer.get("kvs", ())),
                revision=int(json_api.field_at(answer, "header", "revision")),
                store=str(json_api.field_at(answer, "header", "cluster_id")),
                more=bool(answer.get("more")),
            )

        return reads.pages(prefix, fetch)

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        if max(len(guards), len(operations)) > MAX_OPERATIONS:
            raise TooLargeError(
                f"a transaction takes {MAX_OPERATIONS} operations, not {len(operations)}"
            )
        if not guards and len(operations) == 1 and isinstance(operations[0], Delete):
            # etcd 3.5.1 refuses every transaction when its quota is used up, but not this call.
            body = {"key": json_api.b64(operations[0].key)}
            done = await self._route.call("/kv/deleterange", body)
            return int(json_api.field_at(done, "header", "revision"))
        answer = await self._route.call("/kv/txn", json_api.transaction(guards, operations))
        revision = int(json_api.field_at(answer, "header", "revision"))
        if not answer.get("succeeded"):
            raise ConflictError("the data has changed since it was read")
        return revision

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        request = {
            "key": json_api.b64(prefix),
            "range_end": json_api.b64(prefix_end(prefix)),
            "start_revision": str(
                max(1, after_revision)
            ),  # not the next one: see `drop_seen_changes`
            "progress_notify": True,
        }
        # Without the header, a watch on a member that lost its leader would stay open and silent.
        headers = {"Grpc-Metadata-hasleader": "true"}
        store, beats = "", 0
        async with self._route.stream("/watch", {"create_request": request}, headers) as lines:
            async for line in lines:
                if not line:  # etcd is there, and has nothing to say
                    beats += 1
                    if store:
                        yield WatchBatch(revision=after_revision, changes=(), store=store)
                    elif beats == _BEATS_TO_CONFIRM:
                        raise UnavailableError("etcd did not confirm the watch")
                    continue
                frame = json_api.loads(line)
                if is_refusal(_cancel_reason(frame)):
                    # For a stale token, too, etcd may cancel a watch as denied. A call tells the
                    # two apart, and renews the token.
                    end = json_api.b64(prefix_end(prefix))
                    body: json_api.Json = {
                        "key": json_api.b64(prefix),
                        "range_end": end,
                        "count_only": True,
                    }
                    await self._route.read("/kv/range", body)
                if _lags(frame, after_revision) and await self._newest(prefix) < after_revision:
                    # A watch on a future revision would be silent forever.
                    raise ReplacedError("the store was replaced or rolled back")
                batch = self._batch(frame, after_revision)
                if batch:
                    after_revision, store = max(after_revision, batch.revision), batch.store
                    yield batch

    def _batch(self, frame: json_api.Json, after_revision: int) -> WatchBatch | None:
        if "error" in frame:
            raise error_from_status(*json_values.error_body(frame))
        result = frame.get("result", {})
        if result.get("canceled"):
            if int(result.get("compact_revision", 0)):
                raise CompactedError("the history after the last revision seen is gone")
            raise UnavailableError(f"watch cancelled: {result.get('cancel_reason', 'no reason')}")
        header, store = (
            json_api.field_at(result, "header"),
            str(json_api.field_at(result, "header", "cluster_id")),
        )
        revision, is_created = (
            int(json_api.field_at(header, "revision")),
            bool(result.get("created")),
        )
        changes = tuple(json_api.change(tree) for tree in result.get("events", ()))
        # While a watch catches up, etcd's header is ahead of its events, so the last event counts.
        if changes:
            return drop_seen_changes(changes, after_revision, store)
        return WatchBatch(
            revision=after_revision if is_created else revision, changes=(), store=store
        )

    async def _newest(self, key: str) -> int:
        """Return the newest revision of the store, which a lagging member may not have yet."""
        answer = await self._route.read("/kv/range", {"key": json_api.b64(key), "count_only": True})
        return int(json_api.field_at(answer, "header", "revision"))

    async def grant(self, ttl_s: int) -> int:
        return int(
            json_api.field_at(await self._route.call("/lease/grant", {"TTL": str(ttl_s)}), "ID")
        )

    async def keep_alive(self, lease: int) -> int:
        answer = await self._route.read(
            "/lease/keepalive", {"ID": str(lease)}, limit_s=RENEW_S, tries=1
        )
        return int(json_api.field_at(answer, "result").get("TTL", 0))

    async def revoke(self, lease: int) -> None:
        try:
            await self._route.call("/lease/revoke", {"ID": str(lease)})
        except LeaseLostError:
            return

    async def status(self) -> ServerStatus:
        answer = await self._route.read("/maintenance/status", {})
        return ServerStatus(
            version=str(json_api.field_at(answer, "version")),
            revision=int(json_api.field_at(answer, "header", "revision")),
        )

    async def close(self) -> None:
        await self._route.close()


def _cancel_reason(frame: json_api.Json) -> str:
    """Return why the watch was cancelled; "" if it was not, or because of its revision."""
    result = frame.get("result", {})
    return str(result.get("cancel_reason", "")) if result.get("canceled") else ""


def _lags(frame: json_api.Json, after_revision: int) -> bool:
    """Return whether the watch was created at a member that is behind the watcher's revision."""
    result = frame.get("result", {})
    return (
        bool(result.get("created"))
        and int(json_api.field_at(result, "header", "revision")) < after_revision
    )
