"""The webhook `/hooks/git`: a push to a repository requests a sync of its GitSources.

GitHub, Gitea and Forgejo sign the body; GitLab sends the secret itself. A request without a valid signature changes
nothing and learns nothing. A valid one writes the annotation that `fleetctl sync` writes, so any reconciler may receive
it, and the leading one fetches. The body decides only which sources are fetched, never what is fetched.
"""

import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from machinery import process_secrets
from machinery.clock import Clock
from machinery.rate_limit import RateLimit
from machinery.request_body import BodyReader, RequestRefusedError
from schemas.gitsource import (
    GitSource,
    RepositoryAddress,
    repository_address,
    with_sync_request,
)
from store import objects
from store.errors import NotFoundError, StoreError
from store.mutate import mutate
from store.port import Transport

log = logging.getLogger(__name__)

PATH = "/hooks/git"
# Pushes of a hundred commits are some 100 KB; GitHub's largest body is 25 MB.
_MAX_BODY = 2 * 2**20
_BODY_S = 10.0
# Bodies in memory at a time: a signature is known only when the body is complete.
_BODIES = 16
# A burst of pushes, and a push every two seconds after it. A sync that is left out is no loss: sources are polled, too.
_BURST, _PER_S = 20.0, 0.5
_MIN_SECRET = 16
_MAX_URLS = 20
_URL_FIELDS = (
    *("clone_url", "ssh_url", "git_url", "html_url", "url", "homepage"),
    *("git_http_url", "git_ssh_url", "http_url", "web_url"),
)


class SecretError(Exception):
    """The secret file cannot be used."""


def read_secrets(path: Path) -> list[bytes]:
    """Return the secrets of a file, one in each line; several are for a change of the secret.

    Raises:
        SecretError: the file cannot be read, is open to other users, or a secret is short.

    """
    try:
        found = process_secrets.read_secret_file(path).split()
    except process_secrets.OpenSecretError as error:
        raise SecretError(str(error)) from error
    except OSError as error:
        raise SecretError(f"{path} cannot be read: {error.strerror or error}") from error
    if not found or any(len(one) < _MIN_SECRET for one in found):
        raise SecretError(
            f"{path}: expected a secret of {_MIN_SECRET} characters or more in each line; make one with: "
            "openssl rand -hex 32"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The repository and reference of a push."""

    addresses: frozenset[RepositoryAddress]
    """The addresses of the repository, over https and ssh."""
    reference: str = ""
    """The branch or tag, as `refs/heads/main`; empty if the event has none."""


def token_of(headers: Headers) -> bytes | None:
    """Return GitLab's token; None if there is none."""
    token = headers.get("x-gitlab-token")
    return None if token is None else token.encode("latin-1")


def signature_of(headers: Headers) -> str:
    """Return the HMAC-SHA256 of the body in hex, as GitHub, Gitea and Forgejo send it; empty if there is none."""
    signature = headers.get("x-hub-signature-256", "")
    if signature.startswith("sha256="):
        return signature.removeprefix("sha256=")
    return headers.get("x-gitea-signature", "") or headers.get("x-forgejo-signature", "")


def is_signed(signature: str, body: bytes, known: Sequence[bytes]) -> bool:
    """Return whether the body was signed with one of the secrets; every secret is tried, in constant time."""
    given = signature.encode("latin-1", "replace")
    expected = [hmac.new(one, body, hashlib.sha256).hexdigest().encode() for one in known]
    return sum(hmac.compare_digest(one, given) for one in expected) > 0


def is_token(token: bytes, known: Sequence[bytes]) -> bool:
    """Return whether the token is one of the secrets, in constant time."""
    return sum(hmac.compare_digest(one, token) for one in known) > 0


def parse_push(content_type: str, body: bytes) -> Push:
    """Return the push of a body.

    Raises:
        RequestRefusedError: the body is not JSON, or names no repository.

    """
    text: bytes | str = body
    if content_type.partition(";")[0].strip() == "application/x-www-form-urlencoded":
        text = parse_qs(body.decode("utf-8", "replace"), max_num_fields=10).get("payload", [""])[0]
    try:
        event = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(400, "not a push: the body is not JSON") from error
    if not isinstance(event, dict):
        raise RequestRefusedError(400, "not a push: the body is not a JSON object")
    places = [event.get(name) for name in ("repository", "project")]
    urls = [
        place[name]
        for place in places
        if isinstance(place, dict)
        for name in _URL_FIELDS
        if name in place
    ]
    addresses = {
        repository_address(url)
        for url in urls[:_MAX_URLS]
        if isinstance(url, str) and len(url) < 2000
    }
    addresses = {address for address in addresses if address.host and address.path}
    if not addresses:
        message = "not a push: it names no repository with a clone_url, ssh_url or git_http_url"
        raise RequestRefusedError(400, message)
    reference = event.get("ref")
    return Push(
        addresses=frozenset(addresses), reference=reference if isinstance(reference, str) else ""
    )


def concerns(push: Push, source: GitSource) -> bool:
    """Return whether a source applies commits of the repository, and of the branch or tag that was pushed."""
    if repository_address(source.spec.repository) not in push.addresses:
        return False
    wanted = source.spec.reference
    if wanted.commit is not None or not push.reference.startswith(("refs/heads/", "refs/tags/")):
        return True
    tracked = f"refs/tags/{wanted.tag}" if wanted.tag is not None else f"refs/heads/{wanted.branch}"
    return push.reference == tracked


class Webhook:
    """The handler of `/hooks/git`."""

    def __init__(self, transport: Transport, clock: Clock, secret_file: Path) -> None:
        self._transport = transport
        self._clock = clock
        self._secret_file = secret_file
        self._limit = RateLimit(clock, burst=_BURST, per_s=_PER_S)
        self._bodies = BodyReader(limit_bytes=_MAX_BODY, limit_s=_BODY_S, at_once=_BODIES)

    def routes(self) -> list[Route]:
        """Return the routes of the port's application."""
        return [Route(PATH, self.receive, methods=["POST"])]

    def app(self) -> Starlette:
        """Return an application with these routes alone."""
        return Starlette(routes=self.routes())

    async def receive(self, request: Request) -> Response:
        """Request a sync of the sources that a push concerns."""
        try:
            body = await self._signed_body(request)
            push = parse_push(request.headers.get("content-type", ""), body)
            names = await self._request_syncs(push)
        except RequestRefusedError as error:
            return JSONResponse(
                {"error": str(error)}, status_code=error.status, headers=error.headers
            )
        log.info("webhook", extra={"sources": names, "reference": push.reference[:100]})
        return JSONResponse({"requested": names}, status_code=202)

    async def _signed_body(self, request: Request) -> bytes:
        """Return the body of a request that proves to know the secret.

        Raises:
            RequestRefusedError: it does not, or the body is too large or too slow.

        """
        token, signature = token_of(request.headers), signature_of(request.headers)
        try:
            known = read_secrets(self._secret_file)  # anew each time, so that it can be changed
        except SecretError as error:
            log.warning("webhook refused", extra={"why": str(error)})
            message = "the secret of this webhook cannot be read; see the reconciler's log"
            raise RequestRefusedError(503, message) from error
        if not signature and (token is None or not is_token(token, known)):
            raise RequestRefusedError(
                401, "a signature or token with the webhook's secret is required"
            )
        body = await self._bodies.read(request)
        if signature and not is_signed(signature, body, known):
            raise RequestRefusedError(401, "the signature does not match the webhook's secret")
        return body

    async def _request_syncs(self, push: Push) -> list[str]:
        if not self._limit.take():
            message = "too many pushes; the sources are polled as well"
            raise RequestRefusedError(429, message, retry_after_s=2)
        try:
            sources = await objects.list_all(self._transport, GitSource)
            names = sorted(source.name for source in sources if concerns(push, source))
            for name in names:
                await self._request_sync(name)
        except StoreError as error:
            log.warning("webhook could not request a sync", extra={"why": str(error)})
            raise RequestRefusedError(503, "the store does not answer", retry_after_s=5) from error
        return names

    async def _request_sync(self, name: str) -> None:
        request_id = secrets.token_hex(4)
        try:
            await mutate(
                self._transport,
                self._clock,
                GitSource,
                name,
                lambda now: with_sync_request(now, request_id),
            )
        except NotFoundError:
            return  # deleted meanwhile
