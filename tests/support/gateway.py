"""Etcd's JSON gateway, raw: for what the port has no verb for (compaction, alarms, who leads)."""

import base64
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

_LIMIT_S = 2.0


class RefusedError(Exception):
    """The server answered, but not with 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A member's report on itself and on its leader."""

    member: str
    leader: str
    term: int


async def ask(url: str, path: str, body: dict[str, Any], *, limit_s: float = _LIMIT_S) -> Any:
    """Return the answer to one call of the gateway.

    Raises:
        RefusedError: the answer is an error; aiohttp.ClientError or TimeoutError: there is none.

    """
    timeout = aiohttp.ClientTimeout(total=limit_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v3{path}", data=orjson.dumps(body)) as response,
    ):
        raw = await response.read()
        if response.status != 200:
            raise RefusedError(raw.decode(errors="replace"))
        return orjson.loads(raw)


async def reads(url: str) -> bool:
    """Return whether the member answers a linearizable read."""
    try:
        await ask(url, "/kv/range", {"key": _b64("/ready")})
    except (RefusedError, aiohttp.ClientError, TimeoutError, OSError):
        return False
    return True


async def leader_of(url: str) -> Standing | None:
    """Return who leads in the eyes of a member; None if it does not say."""
    try:
        answer = await ask(url, "/maintenance/status", {}, limit_s=0.5)
    except (RefusedError, aiohttp.ClientError, TimeoutError, OSError):
        return None
    return Standing(
        member=answer["header"]["member_id"],
        leader=answer.get("leader", ""),
        term=int(answer["header"]["raft_term"]),
    )


async def revision(url: str) -> int:
    """Return the newest revision, linearizable."""
    answer = await ask(url, "/kv/range", {"key": _b64("/ready")})
    return int(answer["header"]["revision"])


async def compact(url: str, at: int) -> None:
    """Drop the history before the revision; what is gone already is no error."""
    try:
        await ask(url, "/kv/compaction", {"revision": str(at)})
    except RefusedError as error:
        if "compacted" not in str(error):
            raise


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
