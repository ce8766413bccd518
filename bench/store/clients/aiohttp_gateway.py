"""etcd's JSON gateway with nothing but aiohttp and orjson: the least an HTTP client can cost."""

from base64 import b64decode, b64encode
from typing import Any

from bench.store.client import Decode, Told, decoder, prefix_end, vendor

aiohttp, orjson = vendor("aiohttp"), vendor("orjson")
PAGE = 5_000


def b64(raw: bytes) -> str:
    return b64encode(raw).decode()


class Gateway:
    """One session; a put is a put, without any check of what comes back."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v3"
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=2**20)

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(self._url + path, data=orjson.dumps(body)) as response:
            response.raise_for_status()
            return orjson.loads(await response.read())

    async def put(self, key: str, value: bytes) -> None:
        await self._call("/kv/put", {"key": b64(key.encode()), "value": b64(value)})

    async def get(self, key: str) -> bytes:
        answer = await self._call("/kv/range", {"key": b64(key.encode())})
        return b64decode(answer["kvs"][0]["value"])

    async def list(self, prefix: str) -> Decode:
        start, end, revision = prefix.encode(), b64(prefix_end(prefix.encode())), "0"
        found: list[tuple[bytes, bytes, int]] = []
        while True:
            body = {"key": b64(start), "range_end": end, "limit": PAGE, "revision": revision}
            answer = await self._call("/kv/range", body)
            revision = answer["header"]["revision"]
            found += [
                (b64decode(kv["key"]), b64decode(kv["value"]), int(kv["mod_revision"]))
                for kv in answer.get("kvs", ())
            ]
            if not answer.get("more"):
                return decoder(value for _, value, _ in found)
            start = found[-1][0] + b"\0"

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        key = prefix.encode()
        create = {"key": b64(key), "range_end": b64(prefix_end(key))}
        body, endless = orjson.dumps({"create_request": create}), aiohttp.ClientTimeout(total=None)
        async with self._session.post(self._url + "/watch", data=body, timeout=endless) as response:
            async for line in response.content:
                result = orjson.loads(line)["result"]
                if result.get("created"):
                    opened()
                for event in result.get("events", ()):
                    b64decode(event["kv"]["key"])
                    b64decode(event["kv"]["value"])
                    seen()

    inform = watch

    async def grant(self, ttl_s: int) -> int:
        return int((await self._call("/lease/grant", {"TTL": ttl_s}))["ID"])

    async def keep_alive(self, lease: int) -> int:
        answer = await self._call("/lease/keepalive", {"ID": str(lease)})
        return int(answer["result"].get("TTL", 0))

    async def revoke(self, lease: int) -> None:
        await self._call("/lease/revoke", {"ID": str(lease)})

    async def close(self) -> None:
        await self._session.close()


async def connect(url: str, _: str) -> Gateway:
    return Gateway(url)
