"""The routes that make an agent a mirror of model hubs for Hugging Face's clients: `HF_ENDPOINT=https://MAC:4001/hub`.

It serves the models of this Mac's store alone, and asks no hub. Off unless --serve-hub; a client needs a certificate.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

import orjson
from fastapi import FastAPI, Request, Response

from identity.names import Role
from identity.peers import peer_of
from machinery.http_server import SSL_OBJECT
from models.hub.digests import BlobDigest
from models.hub.model_hub import check_repo, is_commit
from models.hub.threads import run_in_thread
from models.model_store.store import ModelStore, StoredModel
from nodeagent.api.blobs import BlobRoutes
from schemas.wire.errors import Refusal, RefusedError

PATH: Final = "/hub"
# Less than the ten seconds after which huggingface_hub gives up a request; it asks again after a 429.
_WAIT_S: Final = 8.0
_ROLES: Final = frozenset((Role.ADMIN, Role.NODE))
# Branches are not recorded on the disk: this one is the commit that was fetched last.
_LATEST: Final = "main"


@dataclass(frozen=True, slots=True)
class HubMirrorRoutes:
    """The requests of huggingface_hub, for the models on this Mac."""

    blobs: BlobRoutes

    @property
    def _store(self) -> ModelStore:
        return self.blobs.store

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the agent's API."""
        api = f"{PATH}/api/models/{{owner}}/{{name}}"
        for path, answer in (
            (f"{api}/revision/{{revision:path}}", self.revision),
            (f"{api}/tree/{{revision}}", self.tree),
            (f"{PATH}/{{owner}}/{{name}}/resolve/{{revision}}/{{path:path}}", self.resolve),
        ):
            app.add_api_route(path, answer, methods=["GET", "HEAD"])

    async def revision(self, request: Request, owner: str, name: str, revision: str) -> Response:
        """Answer with the commit that a revision is, and the names of its files."""
        model = await self._find(request, f"{owner}/{name}", revision)
        siblings = [{"rfilename": file.path} for file in model.files]
        return _json({"id": model.repo, "sha": model.commit, "siblings": siblings, "tags": []})

    async def tree(self, request: Request, owner: str, name: str, revision: str) -> Response:
        """Answer with the files of a commit, in one page. All are named by SHA-256, as the hub names large files."""
        model = await self._find(request, f"{owner}/{name}", revision)
        return _json(
            [
                {
                    "type": "file",
                    "path": file.path,
                    "size": file.size,
                    "oid": file.sha256[:40],
                    "lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134},
                }
                for file in model.files
            ]
        )

    async def resolve(
        self, request: Request, owner: str, name: str, revision: str, path: str
    ) -> Response:
        """Stream a file, or a range of it. A client that knows nothing of other Macs waits for a free place."""
        model = await self._find(request, f"{owner}/{name}", revision)
        file = next((stored_file for stored_file in model.files if stored_file.path == path), None)
        if file is None:
            raise self._missing(
                "EntryNotFound", f"{model.name} has no such file", commit=model.commit
            )
        headers = {
            "x-repo-commit": model.commit,
            "etag": f'"{file.sha256}"',
            "x-linked-etag": f'"{file.sha256}"',
            "x-linked-size": str(file.size),
        }
        if request.method == "HEAD":
            return Response(headers={**headers, "content-length": str(file.size)})
        try:
            async with asyncio.timeout(_WAIT_S):
                await self.blobs.uploads.wait()
        except TimeoutError:
            raise RefusedError(
                Refusal(
                    status=429,
                    message=f"{self.blobs.node}: {self.blobs.uploads.most} files are being sent already; try again later",
                    type="refused",
                    retry_after_s=30,
                )
            ) from None
        return await self.blobs.respond(request, BlobDigest("sha256", file.sha256), headers)

    async def _find(self, request: Request, repo: str, revision: str) -> StoredModel:
        """Return a whole model of this Mac. Raises RefusedError."""
        # Refuse all but administrators and agents of this fleet. Raises RefusedError.
        peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
        if peer is None or peer.identity.role not in _ROLES:
            raise RefusedError(
                Refusal(
                    status=403,
                    message=f"{self.blobs.node}: the mirror needs a certificate of the role admin or node "
                    "(`fleetctl join` writes one)",
                    type="refused",
                )
            )
        try:
            check_repo(repo)
        except ValueError as error:
            raise self._missing("RepoNotFound", str(error)) from error
        if is_commit(revision):
            model = await run_in_thread(self._store.find, repo, revision)
            stored_models = [] if model is None else [model]
        else:
            models = await run_in_thread(self._store.models)
            stored_models = [
                stored_model
                for stored_model in models
                if stored_model.repo == repo and revision == _LATEST
            ]
        if not stored_models:
            raise self._missing(
                "RevisionNotFound",
                f"this Mac has no {repo}@{revision[:80]}; it mirrors what is on its disk: a whole commit, or {_LATEST} "
                "for the one that was fetched last. `fleetctl models list` shows what there is",
            )
        return max(stored_models, key=lambda one: one.fetched_at)

    def _missing(self, code: str, message: str, *, commit: str = "") -> RefusedError:
        extra = [(b"x-error-code", code.encode())]
        if commit:
            extra.append((b"x-repo-commit", commit.encode()))
        return RefusedError(
            Refusal(
                status=404,
                message=f"{self.blobs.node}: {message}",
                type="refused",
                extra_headers=tuple(extra),
            )
        )


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
