"""A model hub for tests: the requests of huggingface_hub over plain HTTP, and the faults of real hubs and links.

Its own test is the real huggingface_hub, which downloads from it: tests/models/hub/test_stand_in_hub.py.
"""

import asyncio
import hashlib
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from aiohttp import web

from machinery.environment import environment_without_secrets
from tests.support.ports import free_port

COMMIT = "1f2e3d4c5b6a79880123456789abcdef01234567"
REPO = "mlx-community/Tiny-4bit"
_LFS_SUFFIXES = (".safetensors", ".model", ".bin")


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str) -> bool:
    return PurePosixPath(path).suffix in _LFS_SUFFIXES


@dataclass(kw_only=True)
class Seen:
    """One request that the hub got."""

    method: str
    path: str
    port: int
    has_token: bool
    range: str
    client: str = ""
    """Address of the client."""
    query: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class HubFaults:
    """The modes of the hub; all are off at first."""

    cut_after: int | None = None
    """Bytes of a body after which the connection is cut."""
    cuts: int = 1 << 30
    """Number of bodies that are cut."""
    status_after_cut: int = 0
    """Status of all answers after the first cut: the hub is gone."""
    bytes_per_s: float | None = None
    flip_bit_at: int | None = None
    """Byte of every large file that is sent with one bit flipped."""
    status: int = 0
    """Status of all answers: 401, 403 (gated), 404, 429, 500."""
    error_code: str = ""
    failures: int = 1 << 30
    """Number of answers with `status`."""
    retry_after: str = "1"
    redirects_to_cdn: bool = False
    """Large files come from another port."""
    loops: bool = False
    gzips_json: bool = False
    page_size: int | None = None
    ignores_range: bool = False
    listing: list[dict[str, object]] | None = None
    """The list of files in place of the true one."""


@dataclass(kw_only=True)
class StandInHub:
    """A hub with one repository for each entry of `repos`, on two ports: the hub's and its CDN's."""

    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    cdn_port: int = field(default_factory=free_port)
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by path, by repository."""
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str = ""
    """Token without which everything is refused; empty for none."""
    faults: HubFaults = field(default_factory=HubFaults)
    seen: list[Seen] = field(default_factory=list)
    body_bytes: int = 0
    """Bytes of files that were sent."""
    _sending: set[asyncio.Transport] = field(default_factory=set)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["StandInHub"]:
        """Serve both ports until the end of the block."""
        runner = web.AppRunner(self._app(), shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        try:
            for port in (self.port, self.cdn_port):
                await web.TCPSite(runner, self.host, port, reuse_address=True).start()
            yield self
        finally:
            await runner.cleanup()

    def cut(self) -> None:
        """Cut the connections over which files are being sent."""
        for transport in self._sending:
            transport.abort()

    def requests(self, method: str, part: str) -> list[Seen]:
        return [one for one in self.seen if one.method == method and part in one.path]

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._record])
        app.router.add_get("/api/agent-harnesses", self._harnesses)
        app.router.add_get("/api/models/{org}/{name}/revision/{revision:.+}", self._revision)
        app.router.add_get("/api/models/{org}/{name}/tree/{revision}", self._tree)
        app.router.add_get("/cdn/{org}/{name}/{path:.+}", self._cdn)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        return app

    @web.middleware
    async def _record(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        bearer = request.headers.get("Authorization", "")
        port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
        self.seen.append(
            Seen(
                method=request.method,
                path=request.path,
                port=port,
                has_token=bool(bearer or request.cookies),
                range=request.headers.get("Range", ""),
                client=request.remote or "",
                query=dict(request.query),
            )
        )
        faults = self.faults
        if faults.loops:
            return web.Response(status=302, headers={"Location": str(request.rel_url)})
        if faults.status and faults.failures > 0:
            faults.failures -= 1
            return self._failure(faults.status, faults.error_code)
        if self.token and port == self.port and bearer != f"Bearer {self.token}":
            return self._failure(401, "")
        return await handler(request)

    def _failure(self, status: int, code: str) -> web.Response:
        headers = {"X-Error-Code": code} if code else {}
        if status == 429:
            headers["ratelimit"] = f'"api";r=0;t={self.faults.retry_after}'
        return web.json_response({"error": "the stand-in says no"}, status=status, headers=headers)

    def _files(self, request: web.Request) -> dict[str, bytes]:
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        if repo not in self.repos:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        return self.repos[repo]

    def _commit(self, request: web.Request) -> str:
        revision = request.match_info["revision"]
        if revision in self.branches:
            return self.branches[revision]
        if revision in self.branches.values():
            return revision
        raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})

    async def _harnesses(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _revision(self, request: web.Request) -> web.StreamResponse:
        files = self._files(request)
        siblings = [{"rfilename": path} for path in files]
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        sha = self._commit(request)
        return await self._json(request, {"id": repo, "sha": sha, "siblings": siblings, "tags": []})

    async def _tree(self, request: web.Request) -> web.StreamResponse:
        files = self._files(request)
        self._commit(request)
        entries = self.faults.listing
        if entries is None:
            entries = [_tree_entry(path, content) for path, content in sorted(files.items())]
        size = self.faults.page_size
        if size is None:
            return await self._json(request, entries)
        start = int(request.query.get("cursor", "0"))
        headers = {}
        if start + size < len(entries):
            following = request.url.update_query(cursor=start + size)
            headers["Link"] = f'<{following}>; rel="next"'
        return await self._json(request, entries[start : start + size], headers)

    async def _json(
        self, request: web.Request, content: object, headers: dict[str, str] | None = None
    ) -> web.StreamResponse:
        if not self.faults.gzips_json:
            return web.json_response(content, headers=headers)
        response = web.StreamResponse(
            headers={**(headers or {}), "Content-Type": "application/json"}
        )
        response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(json.dumps(content).encode())
        await response.write_eof()
        return response

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        files = self._files(request)
        commit = self._commit(request)
        path = request.match_info["path"]
        if path not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            raise web.HTTPNotFound(headers=headers)
        content = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(path, content)}"'}
        if is_lfs(path):
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": headers["ETag"]}
        if is_lfs(path) and self.faults.redirects_to_cdn:
            repo = f"{request.match_info['org']}/{request.match_info['name']}"
            headers["Location"] = f"http://{self.host}:{self.cdn_port}/cdn/{repo}/{quote(path)}"
            return web.Response(status=302, headers=headers)
        return await self._body(request, content, headers)

    async def _cdn(self, request: web.Request) -> web.StreamResponse:
        return await self._body(request, self._files(request)[request.match_info["path"]], {})

    async def _body(
        self, request: web.Request, content: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        faults = self.faults
        if faults.flip_bit_at is not None and faults.flip_bit_at < len(content):
            changed = bytearray(content)
            changed[faults.flip_bit_at] ^= 1
            content = bytes(changed)
        start, status = 0, 200
        asked = request.http_range.start
        if asked and not faults.ignores_range:
            start, status = asked, 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        rest = content[start:]
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(rest)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        transport = request.transport
        assert transport is not None
        self._sending.add(transport)
        try:
            return await self._send(request, response, rest)
        except ConnectionError:  # cut, or the client has gone
            return response
        finally:
            self._sending.discard(transport)

    async def _send(
        self, request: web.Request, response: web.StreamResponse, rest: bytes
    ) -> web.StreamResponse:
        faults = self.faults
        end = len(rest)
        if faults.cut_after is not None and faults.cut_after < end and faults.cuts > 0:
            end = faults.cut_after
            faults.cuts -= 1
            faults.status = faults.status_after_cut
        step = 16384 if faults.bytes_per_s else 1 << 18
        for at in range(0, end, step):
            piece = rest[at : min(end, at + step)]
            await response.write(piece)
            self.body_bytes += len(piece)
            if faults.bytes_per_s:
                await asyncio.sleep(len(piece) / faults.bytes_per_s)
        if end < len(rest) and request.transport is not None:
            request.transport.close()
        return response


def _etag(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if is_lfs(path) else git_sha1(content)


def _tree_entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content)}
    if not is_lfs(path):
        return {**entry, "oid": git_sha1(content)}
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return {**entry, "oid": git_sha1(json.dumps(lfs).encode()), "lfs": lfs}


def tiny_files(*, weights: int = 300_000, seed: int = 1) -> dict[str, bytes]:
    """Return the files of a repository: MLX's, a README, and code that nobody may fetch."""
    random_bytes = random.Random(seed).randbytes
    return {
        "README.md": b"# Tiny\n",
        "config.json": b'{"model_type": "llama"}\n',
        "model-00001-of-00002.safetensors": random_bytes(weights),
        "model-00002-of-00002.safetensors": random_bytes(weights // 3),
        "modeling_tiny.py": b"raise SystemExit\n",
        "templates/chat template #1.jinja": "{{ 'grüße' }}\n".encode(),
        "tokenizer.json": random_bytes(5000),
    }


# One process for all downloads: the import takes a second. With TLS, as docs/operations/model-store.md shows it.
_CLIENT = """
import os, ssl, sys
import httpx2
from huggingface_hub import set_client_factory, snapshot_download

if identity := os.environ.get("IDENTITY"):
    context = ssl.create_default_context(cafile=f"{identity}/ca.pem")
    context.load_cert_chain(f"{identity}/identity.pem")

    def expect_node(request):
        request.extensions["sni_hostname"] = os.environ["NODE"]

    set_client_factory(lambda: httpx2.Client(verify=context, event_hooks={"request": [expect_node]}))

repo, folder, *revisions = sys.argv[1:]
for number, revision in enumerate(revisions):
    print(snapshot_download(repo, revision=revision, cache_dir=f"{folder}/{number}"))
"""


async def run_hub_client(
    endpoint: str, folder: Path, *revisions: str, **variables: str
) -> list[Path]:
    """Download revisions of `REPO` with the real huggingface_hub; return the folders of their snapshots."""
    environment = environment_without_secrets() | {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(folder / "home"),
        **variables,
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CLIENT, REPO, str(folder), *revisions),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(), timeout=60)
    assert child.returncode == 0, err.decode()
    return [Path(line) for line in out.decode().splitlines()]
