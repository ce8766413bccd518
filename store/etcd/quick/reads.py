"""The adapter that only looks: `store.port.Reads` over etcd's JSON gateway, without an event loop.

Its functions are coroutines like the port's, and never wait for one: `drive` runs whatever is built of
them. It says little about what went wrong; who gets an error asks again by `store.etcd.connect`, whose
adapters know more ways, and the words for people.
"""

import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from machinery.clock import Clock
from store import paging
from store.errors import AuthOffError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.answers import Json, at, b64, key_value, not_etcd, refusal
from store.etcd.meanings import exception_of
from store.etcd.quick.connection import BrokenError, Connection
from store.keys import prefix_end
from store.listing import KeyValue, Listing

T = TypeVar("T")

# As the other adapters: a call, and one page of a list.
_CALL_S, _LIST_S = 2.0, 5.0


def drive(main: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits for nothing but this adapter."""
    try:
        main.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    main.close()
    raise RuntimeError("it waits for an event loop; only what reads by QuickReads may be driven")


class QuickReads:
    """Reads keys of the etcd at an address, below its prefix; connects when first used. To be closed."""

    def __init__(self, address: EtcdAddress, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._urls = [url.rstrip("/") for url in address.endpoints] or [""]
        self._connection: Connection | None = None
        self._token: str | None = None
        self._has_asked = not address.username

    async def get(self, key: str) -> KeyValue | None:
        """Return the key as it is now (linearizable); None if it is not there."""
        answer = self._call("/kv/range", {"key": b64(self._address.prefix + key)}, _CALL_S)
        found = answer.get("kvs", ())
        return self._inside(key_value(found[0])) if found else None

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`, all as of one revision."""
        found = await paging.collect(lambda: self._pages(self._address.prefix + prefix))
        items = tuple([self._inside(item) for item in found.items])
        return Listing(revision=found.revision, items=items, store=found.store)

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pages(self, prefix: str) -> AsyncGenerator[Listing]:
        range_end = b64(prefix_end(prefix))

        async def fetch(*, start: str, revision: int, limit: int) -> paging.Page:
            body = {
                "key": b64(start),
                "range_end": range_end,
                "limit": limit,
                "revision": str(revision),
            }
            answer = self._call("/kv/range", body, _LIST_S)
            return paging.Page(
                items=tuple(key_value(tree) for tree in answer.get("kvs", ())),
                revision=int(at(answer, "header", "revision")),
                store=str(at(answer, "header", "cluster_id")),
                more=bool(answer.get("more")),
            )

        return paging.pages(prefix, fetch)

    def _inside(self, item: KeyValue) -> KeyValue:
        return item._replace(key=item.key.removeprefix(self._address.prefix))

    def _call(self, path: str, body: Json, limit_s: float) -> Json:
        """Return what the first member says that answers.

        Raises:
            StoreError: none did, or it refused.

        """
        for turn in range(len(self._urls)):
            try:
                return self._ask(path, body, limit_s)
            except UnavailableError:
                self.close()
                self._urls.append(self._urls.pop(0))
                if turn == len(self._urls) - 1:
                    raise
        raise AssertionError("unreachable")

    def _ask(self, path: str, body: Json, limit_s: float) -> Json:
        if not self._has_asked:
            self._token = self._authenticated()
            self._has_asked = True
        return self._exchange(path, body, limit_s)

    def _authenticated(self) -> str | None:
        who = {"name": self._address.username, "password": self._address.password}
        try:
            return str(at(self._exchange("/auth/authenticate", who, _CALL_S), "token"))
        except AuthOffError:
            return None

    def _exchange(self, path: str, body: Json, limit_s: float) -> Json:
        if self._connection is None:
            self._connection = self._connected()
        headers = {} if self._token is None else {"Authorization": self._token}
        raw = json.dumps(body).encode()
        answer = self._connection.post(f"/v3{path}", raw, headers, limit_s)
        if answer.is_last:
            self.close()
        tree = _parsed(answer.body)
        if answer.status != 200:
            raise exception_of(*refusal(tree))
        return tree

    def _connected(self) -> Connection:
        try:
            tls = self._address.ssl_context()
        except OSError as error:  # SSLError is one
            raise BrokenError(f"the certificate files cannot be used: {error}") from error
        return Connection(self._address, self._urls[0], self._clock, tls)


def _parsed(said: bytes) -> Json:
    try:
        tree = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise not_etcd(said) from error
    if not isinstance(tree, dict):
        raise not_etcd(said)
    return tree
