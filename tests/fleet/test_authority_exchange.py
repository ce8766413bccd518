"""The authority of a joined fleet is exchanged while it serves; no request fails."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509

from identity.authority import is_signed_by, load_authorities, load_certificate
from identity.folder import IdentityFolder
from tests.support.two_macs import MARKS, SPREAD, Mac, joined, two_macs
from tests.support.waiting import until

pytestmark = [*MARKS, pytest.mark.mlx, pytest.mark.timeout(540)]

_TRIES = 30


def identities(*macs: Mac) -> Iterator[IdentityFolder]:
    """Yield the identities of all processes."""
    for mac in macs:
        for file in mac.root.rglob("identity.pem"):
            yield IdentityFolder(file.parent)


def bundle(mac: Mac) -> Path:
    """Return the file with the authorities that the gateway trusts now."""
    return mac.data / "identities" / "gateway" / "ca.pem"


@asynccontextmanager
async def under_load(mac: Mac, key: str) -> AsyncIterator[list[str]]:
    """Ask the gateway from three clients that trust what the fleet trusts; yield the errors, and check that there are none."""
    errors: list[str] = []
    done: list[int] = []
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            # A new connection each time, verified with the authorities of this moment.
            connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=bundle(mac)))
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "stream": True}
            headers = {"authorization": f"Bearer {key}"}
            url = f"{mac.url}/v1/completions"
            try:
                async with (
                    aiohttp.ClientSession(connector=connector) as session,
                    session.post(url, json=body, headers=headers) as answer,
                ):
                    text = await answer.text()
                    done.append(answer.status)
                    if answer.status != 200 or not text.rstrip().endswith("data: [DONE]"):
                        errors.append(f"{answer.status}: {text[-200:]}")
            except aiohttp.ClientError as error:
                errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(client())
        yield errors
        is_over.set()
    assert len(done) > 100
    assert errors == []


async def test_the_authority_is_exchanged_under_load(tmp_path: Path, models_dir: Path) -> None:
    async with two_macs(tmp_path, models_dir) as (first, second):
        await first.up()
        await joined(first, second)
        await first.ok("apply", "-f", "-", stdin=SPREAD)
        await first.ok("wait", "md/tiny", "--for=condition=Available", "--timeout=120s")
        key = (await first.ok("create", "apikey", "ci")).strip()
        words = ("cert", "rotate-authority", "--authority-dir", str(first.data / "authority"))
        async with under_load(first, key):
            await done(first, *words)
            await until(
                lambda: all(trusted(identity) == 2 for identity in identities(first, second)),
                limit_s=90,
                what="trust in both authorities",
            )
            new = load_authorities(bundle(first).read_text())[-1]
            await done(first, *words, "--activate", "--settle", "5s")
            await until_signed_by(new, first, second)
            await done(first, *words, "--finish")
            await until(
                lambda: all(trusted(identity) == 1 for identity in identities(first, second)),
                limit_s=90,
                what="the end of the old authority",
            )
            await first.ok("apply", "-f", "-", stdin=SPREAD.replace(b"512", b"640"))
            await first.ok("rollout", "status", "md/tiny", "--timeout=90s")
        assert "TLS mode strict" in await first.ok("secure", "status")


async def done(mac: Mac, *words: str) -> None:
    """Run a step of the exchange; etcd, which starts again for each of them, may not answer for a moment."""
    for _ in range(_TRIES):
        found = await mac.run(*words)
        if found.code == 0:
            return
        assert "no answer from etcd" in found.err, found.err + mac.last_words()
        await asyncio.sleep(1)
    raise AssertionError(mac.last_words())


async def until_signed_by(authority: x509.Certificate, *macs: Mac) -> None:
    """Wait until every identity has a certificate by the authority; name those that have none."""
    deadline = asyncio.get_running_loop().time() + 240
    while old := [
        str(identity.path)
        for identity in identities(*macs)
        if not is_signed_by(load_certificate(identity.certificate()), authority)
    ]:
        assert asyncio.get_running_loop().time() < deadline, f"{old}\n{macs[0].last_words()}"
        await asyncio.sleep(1)


def trusted(folder: IdentityFolder) -> int:
    """Return the number of authorities that a process trusts."""
    return len(load_authorities(folder.read_authorities()))
