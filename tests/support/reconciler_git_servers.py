"""Git servers on loopback: dulwich's over TCP and HTTP, and an ssh server of asyncssh for a repository on disk."""

import asyncio
import base64
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server

import asyncssh
from dulwich.protocol import ReceivableProtocol
from dulwich.repo import Repo
from dulwich.server import (
    BackendRepo,
    DictBackend,
    TCPGitServer,
    UploadPackHandler,
)
from dulwich.web import WSGIRequestHandlerLogger, WSGIServerLogger, make_wsgi_chain


def _backend(repo: Repo) -> DictBackend:
    served: dict[str, BackendRepo] = {"/fleet.git": repo}
    return DictBackend(served)


@contextmanager
def over_tcp(repo: Repo) -> Iterator[str]:
    """Serve a repository as git://; yield its address."""
    server = TCPGitServer(_backend(repo), "127.0.0.1", 0)
    with _in_thread(server):
        yield f"git://127.0.0.1:{server.server_address[1]}/fleet.git"


@contextmanager
def over_http(repo: Repo, *, password: str = "") -> Iterator[str]:
    """Serve a repository over http to clients with the password."""
    chain = make_wsgi_chain(_backend(repo))

    def guarded(environ: dict[str, Any], start: Any) -> Any:
        wanted = "Basic " + base64.b64encode(f"anna:{password}".encode()).decode()
        if password and environ.get("HTTP_AUTHORIZATION") != wanted:
            # A server that echoes its input.
            told = environ.get("HTTP_AUTHORIZATION", "nothing")
            start("401 Unauthorized", [("WWW-Authenticate", f"Basic realm={told!r}")])
            return [b""]
        return chain(environ, start)

    server = make_server(
        "127.0.0.1",
        0,
        guarded,
        handler_class=WSGIRequestHandlerLogger,
        server_class=WSGIServerLogger,
    )
    with _in_thread(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/fleet.git"


@contextmanager
def _in_thread(server: Any) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class Keys:
    """The keys of a host and of a person, and the files that a source names."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.host = asyncssh.generate_private_key("ssh-ed25519")
        self.person = asyncssh.generate_private_key("ssh-ed25519")
        self.folder = folder
        self.key_file, self.hosts_file = folder / "deploy-key", folder / "known_hosts"
        self.key_file.write_bytes(self.person.export_private_key())
        self.key_file.chmod(0o600)

    def know(self, port: int, key: asyncssh.SSHKey) -> None:
        """Write a known_hosts file for the host on the port."""
        public = key.export_public_key().decode().strip()
        self.hosts_file.write_text(f"[127.0.0.1]:{port} {public}\n")


@asynccontextmanager
async def over_ssh(repo: Repo, keys: Keys) -> AsyncIterator[int]:
    """Serve a repository over ssh to clients with the key; yield the port."""
    authorized = asyncssh.import_authorized_keys(keys.person.export_public_key().decode())

    async def serve(process: "asyncssh.SSHServerProcess[bytes]") -> None:
        assert process.command == "git-upload-pack '/fleet.git'"
        await _upload_pack(process, repo)
        process.exit(0)
        await process.wait_closed()

    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[keys.host],
        authorized_client_keys=authorized,
        process_factory=serve,
        encoding=None,
    )
    try:
        yield server.get_port()
    finally:
        server.close()
        await server.wait_closed()


async def _upload_pack(process: "asyncssh.SSHServerProcess[bytes]", repo: Repo) -> None:
    """Let dulwich answer in a thread, because it blocks; joined by socket pairs, one per direction."""
    incoming, stdin = socket.socketpair()
    outgoing, stdout = socket.socketpair()
    await process.redirect(stdin=stdin, stdout=stdout)

    def answer() -> None:
        with incoming, outgoing:
            protocol = ReceivableProtocol(incoming.recv, outgoing.sendall)
            backend = _backend(repo)
            UploadPackHandler(backend, ["/fleet.git"], protocol).handle()

    try:
        await asyncio.to_thread(answer)
        await process.stdout.drain()
    finally:
        # Otherwise asyncssh leaves a coroutine that nobody awaits, if its pipes were closed before its channel.
        await process.wait_closed()
