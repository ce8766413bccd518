"""Tests of `store.etcd.authentication`: a process requests one token at a time, and an overloaded etcd recovers."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from itertools import pairwise

import pytest

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from store.errors import (
    PermissionDeniedError,
    SlowStoreError,
    StoreError,
    UnauthenticatedError,
    UnavailableError,
)
from store.etcd.adapter import EndpointCaller
from store.etcd.address import EtcdAddress
from store.etcd.authentication import AUTHENTICATE_S, Authentication

ADDRESS = EtcdAddress(endpoints=("http://etcd:2379",), username="fleet", password="f")
BCRYPT_S = 0.1


class BcryptServer:
    """An etcd that verifies passwords one after another, also those whose client has left, as etcd does."""

    def __init__(self) -> None:
        self.cost_s = BCRYPT_S
        self.asked: list[float] = []
        self.issued = 0
        self.valid: set[str] = set()
        self.failure: StoreError | None = None
        self._turn = asyncio.Lock()
        self._work: set[asyncio.Task[None]] = set()

    async def authenticate(self) -> str:
        """Return a new token; raise UnavailableError after the limit of a request, as a transport does."""
        self.asked.append(asyncio.get_running_loop().time())
        if self.failure is not None:
            raise self.failure
        work = asyncio.get_running_loop().create_task(self._verify())
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        try:
            async with asyncio.timeout(AUTHENTICATE_S):
                await asyncio.shield(work)
        except TimeoutError:
            raise UnavailableError("etcd: no answer") from None
        token = f"token-{self.issued}"
        self.issued += 1
        self.valid.add(token)
        return token

    async def answer(self, token: str | None) -> str:
        """Answer a call with the token."""
        if token not in self.valid:
            raise UnauthenticatedError("invalid auth token")
        return "done"

    async def _verify(self) -> None:
        async with self._turn:
            await asyncio.sleep(self.cost_s)

    async def idle(self) -> None:
        await asyncio.gather(*self._work)


def make_caller(server: BcryptServer) -> EndpointCaller:
    authentication = Authentication(ADDRESS, clock=VirtualClock(), jitter=lambda: 1.0)
    return EndpointCaller(ADDRESS, server.authenticate, authentication)


async def accept_any(token: str | None) -> str | None:
    return token


def in_virtual_time(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: object) -> None:
        virtual_time.run(test(**arguments))

    return run


@in_virtual_time
async def test_callers_that_give_up_do_not_cancel_the_request() -> None:
    server = BcryptServer()
    server.cost_s = 5.0
    caller = make_caller(server)
    first = await asyncio.gather(
        *(caller.call(accept_any) for _ in range(20)), return_exceptions=True
    )
    assert {type(error) for error in first} == {SlowStoreError}
    assert "is there but slow" in str(first[0])
    await asyncio.sleep(3.5)  # the request is answered 5 s after its start
    found = await asyncio.gather(*(caller.call(accept_any) for _ in range(20)))
    assert set(found) == {"token-0"}
    assert len(server.asked) == 1


@in_virtual_time
async def test_a_cancelled_caller_does_not_cancel_the_request() -> None:
    server = BcryptServer()
    caller = make_caller(server)
    task = asyncio.get_running_loop().create_task(caller.token())
    await asyncio.sleep(BCRYPT_S / 2)
    task.cancel()
    assert await caller.token() == "token-0"
    assert len(server.asked) == 1


@in_virtual_time
async def test_requests_back_off_while_etcd_does_not_answer() -> None:
    server = BcryptServer()
    server.failure = UnavailableError("etcd: nothing listens there")
    caller = make_caller(server)

    async def ask_again_and_again() -> None:
        while True:
            try:
                await caller.call(accept_any)
            except UnavailableError:
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask_again_and_again()) for _ in range(8)]
        await asyncio.sleep(60)
        server.failure = None
        healed_at = asyncio.get_running_loop().time()
        assert await caller.token(limit_s=10) == "token-0"
        assert asyncio.get_running_loop().time() - healed_at < 3
        for task in asking:
            task.cancel()
    gaps = [after - before for before, after in pairwise(server.asked)]
    assert gaps[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.01)
    assert gaps[-1] == pytest.approx(2.0, abs=0.01)
    assert len(server.asked) < 40


@in_virtual_time
async def test_a_wrong_password_is_asked_about_ever_more_rarely() -> None:
    server = BcryptServer()
    server.failure = PermissionDeniedError("invalid user ID or password")
    caller = make_caller(server)
    end_s = asyncio.get_running_loop().time() + 600
    while asyncio.get_running_loop().time() < end_s:
        with pytest.raises(PermissionDeniedError, match=r"etcd refuses user 'fleet': .*password"):
            await caller.token()
        await asyncio.sleep(0.01)
    assert len(server.asked) < 30


@in_virtual_time
async def test_only_etcds_refusal_ends_a_token_and_once() -> None:
    server = BcryptServer()
    caller = make_caller(server)

    async def break_off(_: str | None) -> str:
        raise UnavailableError("the connection broke", ambiguous=True)

    async def refuse_the_first(token: str | None) -> str | None:
        if token == "token-0":
            raise UnauthenticatedError("invalid auth token")
        return token

    assert await caller.call(accept_any) == "token-0"
    for _ in range(5):
        with pytest.raises(UnavailableError):
            await caller.call(break_off)
    assert await caller.call(accept_any) == "token-0"
    found = await asyncio.gather(*(caller.call(refuse_the_first) for _ in range(32)))
    assert set(found) == {"token-1"}
    caller.reject_token("token-0")  # a late watch reports the old token
    assert await caller.call(accept_any) == "token-1"
    assert len(server.asked) == 2


@in_virtual_time
async def test_tokens_that_are_never_accepted_are_not_requested_in_a_row() -> None:
    server = BcryptServer()
    caller = make_caller(server)

    async def refuse(_: str | None) -> str:
        raise UnauthenticatedError("invalid auth token")

    until_s = asyncio.get_running_loop().time() + 60
    while asyncio.get_running_loop().time() < until_s:
        with pytest.raises((UnauthenticatedError, UnavailableError)):
            await caller.call(refuse)
    assert len(server.asked) < 45


@in_virtual_time
async def test_closing_ends_the_request() -> None:
    server = BcryptServer()
    server.cost_s = 1e6
    caller = EndpointCaller(ADDRESS, server.authenticate)
    with pytest.raises(UnavailableError):
        await caller.token(limit_s=0.1)
    started_at = asyncio.get_running_loop().time()
    await caller.close()
    assert asyncio.get_running_loop().time() - started_at < 1
    for task in server._work:
        task.cancel()


@pytest.mark.parametrize("slowness", [10.0, 60.0])
@in_virtual_time
async def test_a_fleet_recovers_from_a_slow_etcd(slowness: float) -> None:
    """Six processes with eight watches each lose their tokens while etcd verifies a password slowly for a minute."""

    server = BcryptServer()
    callers = [make_caller(server) for _ in range(6)]
    last_s = dict.fromkeys(range(48), float("inf"))

    async def work(number: int) -> None:
        while True:
            try:
                await callers[number % 6].call(server.answer)
                last_s[number] = asyncio.get_running_loop().time()
                await asyncio.sleep(0.5)
            except StoreError:
                await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work(number)) for number in range(48)]
        await asyncio.sleep(10)
        server.cost_s = BCRYPT_S * slowness
        server.valid.clear()
        await asyncio.sleep(60)
        server.cost_s, healed_at = BCRYPT_S, asyncio.get_running_loop().time()
        asked = len(server.asked)
        await asyncio.sleep(10)
        assert all(at > healed_at + 8 for at in last_s.values())
        # Not more than one request of each process was needed after the end.
        assert len(server.asked) - asked <= 12
        for task in workers:
            task.cancel()
    await server.idle()
