"""The address of an etcd, with TLS files and user. Does no I/O beyond reading certificate files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from typing_extensions import override

from machinery.process_secrets import check_secret_file

if TYPE_CHECKING:  # a quarter of the import time of `fleetctl get`, for https only
    import ssl


FileState: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """The URLs of an etcd, which are tried in turn, or its unix socket; with TLS files and user."""

    endpoints: tuple[str, ...] = ()
    socket: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    transport: Literal["grpc", "http"] = "grpc"
    """gRPC, or the JSON gateway where only plain HTTP passes."""
    prefix: str = ""
    """Prefix of the fleet's keys in an etcd that is shared with others: `/lab`."""

    def ssl_context(self) -> "ssl.SSLContext | None":
        """Return the TLS context; host names are checked.

        Raises:
            OSError: a file cannot be read; ssl.SSLError: it is not valid.

        """
        if not any(url.startswith("https:") for url in self.endpoints):
            return None
        import ssl  # noqa: PLC0415 - see above

        context = ssl.create_default_context(cafile=self.ca)
        self._load_certificate(context)
        return context

    def reload(self, context: "ssl.SSLContext") -> None:
        """Let the new connections of a context use the files as they are now. Authorities are added, none is removed.

        Raises:
            OSError: a file cannot be read; ssl.SSLError: it is not valid.

        """
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        self._load_certificate(context)

    def _load_certificate(self, context: "ssl.SSLContext") -> None:
        if self.certificate is not None:
            check_secret_file(self.key or self.certificate)
            context.load_cert_chain(self.certificate, self.key)

    def file_state(self) -> FileState:
        """Return a value that changes with each of the TLS files."""
        return tuple(map(_file_state, (self.ca, self.certificate, self.key)))

    @override
    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else ", ".join(self.endpoints)


def _file_state(path: Path | None) -> tuple[int, ...]:
    if path is None:
        return ()
    try:
        result = path.stat()
    except OSError:
        return ()
    return (result.st_mtime_ns, result.st_size, result.st_ino)
