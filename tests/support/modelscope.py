"""A ModelScope for tests: the requests of its SDK, its silent limit on lists, and the faults of `tests.support.hub`.

Its own test is the real SDK, modelscope-hub, which downloads from it: tests/models/hub/test_stand_in_modelscope.py.
"""

import asyncio
import hashlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from aiohttp import web
from typing_extensions import override

from machinery.environment import environment_without_secrets
from tests.support.hub import REPO, StandInHub, is_lfs
from tests.support.model_store import files_below

HAS_SDK = importlib.util.find_spec("modelscope_hub") is not None
_CODES = {401: 10010103009, 404: 10010205001}


@dataclass(kw_only=True)
class StandInModelScope(StandInHub):
    """A ModelScope with one repository for each entry of `repos`; every branch has the same files."""

    branches: dict[str, str] = field(default_factory=lambda: {"master": "", "v1": ""})
    list_limit: int = 3000
    """Entries after which a list ends without a word about it."""

    @override
    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._record])
        app.router.add_get("/api/v1/repos/internalAccelerationInfo", self._acceleration)
        app.router.add_get("/api/v1/models/{org}/{name}/repo/files", self._list)
        app.router.add_get("/api/v1/models/{org}/{name}/repo", self._file)
        app.router.add_get("/cdn/{org}/{name}/{path:.+}", self._cdn)
        return app

    @override
    def _failure(self, status: int, code: str) -> web.Response:
        headers = {"Retry-After": self.faults.retry_after} if status == 429 else {}
        body = {
            "Code": _CODES.get(status, status),
            "Message": "the stand-in says no",
            "RequestId": "00000000-0000-4000-8000-000000000000",
            "Success": False,
        }
        return web.json_response(body, status=status, headers=headers)

    async def _acceleration(self, _: web.Request) -> web.Response:
        return web.json_response({"Code": 200, "Data": {}, "Success": True})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        try:
            files = self._files(request)
        except web.HTTPNotFound:
            return self._failure(404, "")
        if request.query["Revision"] not in self.branches:
            return self._failure(404, "")
        entries = self.faults.listing
        if entries is None:
            entries = _entries(
                files, request.query.get("Root", ""), request.query["Recursive"] == "True"
            )
        data = {"Files": entries[: self.list_limit]}
        return await self._json(request, {"Code": 200, "Data": data, "Success": True})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = request.query["FilePath"]
        files = self._files(request)
        if request.query["Revision"] not in self.branches or path not in files:
            return self._failure(404, "")
        if is_lfs(path) and self.faults.redirects_to_cdn:
            repo = f"{request.match_info['org']}/{request.match_info['name']}"
            target = f"http://{self.host}:{self.cdn_port}/cdn/{repo}/{quote(path)}"
            return web.Response(status=302, headers={"Location": target})
        return await self._body(request, files[path], {})


def _entries(files: dict[str, bytes], root: str, is_recursive: bool) -> list[dict[str, object]]:
    """Return the files and folders below a folder, as the hub lists them."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    found: list[dict[str, object]] = [_entry(path, "tree", b"") for path in folders]
    found += [_entry(path, "blob", content) for path, content in files.items()]
    return sorted(
        (one for one in found if _is_below(str(one["Path"]), root, is_recursive)),
        key=lambda one: str(one["Path"]),
    )


def _is_below(path: str, root: str, is_recursive: bool) -> bool:
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    wanted = root or "."
    return wanted in parents if is_recursive else parents[0] == wanted


def _entry(path: str, kind: str, content: bytes) -> dict[str, object]:
    return {
        "Path": path,
        "Name": PurePosixPath(path).name,
        "Type": kind,
        "Size": len(content),
        "Sha256": hashlib.sha256(content).hexdigest() if kind == "blob" else "",
        "IsLFS": is_lfs(path),
        "Revision": "0" * 40,
        "CommittedDate": 1_763_000_000,
    }


_DOWNLOAD = """
import sys
from modelscope_hub.compat.snapshot_download import snapshot_download

repo, folder, revision = sys.argv[1:]
print(snapshot_download(repo, revision=revision, local_dir=folder))
"""
_LIST = """
import sys
from modelscope_hub import HubApi

repo, folder, revision = sys.argv[1:]
print(len(HubApi().legacy.list_repo_files(repo, "model", revision)))
"""


async def download_with_sdk(
    endpoint: str, folder: Path, revision: str, **variables: str
) -> dict[str, bytes]:
    """Return the files of `REPO` that the real SDK downloads into a folder."""
    await _run(_DOWNLOAD, endpoint, folder, revision, variables)
    return files_below(folder / "model")


async def count_with_sdk(endpoint: str, folder: Path, revision: str) -> int:
    """Return the number of entries that the real SDK finds in `REPO`."""
    return int(await _run(_LIST, endpoint, folder, revision, {}))


async def _run(
    script: str, endpoint: str, folder: Path, revision: str, variables: dict[str, str]
) -> str:
    environment = environment_without_secrets() | {
        "MODELSCOPE_ENDPOINT": endpoint,
        "MODELSCOPE_CACHE": str(folder / "cache"),
        "MODELSCOPE_HOME": str(folder / "home"),
        **variables,
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, REPO, str(folder / "model"), revision),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(), timeout=60)
    assert child.returncode == 0, err.decode()
    return out.decode().splitlines()[-1]
