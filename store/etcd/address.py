"""Where etcd is, and who we are to it. Does no I/O beyond reading certificate files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from machinery.typing_compat import override

if TYPE_CHECKING:  # a fourth of what `fleetctl get` imports, for https alone
    import ssl


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """Where etcd is, and who we are to it: URLs tried in turn, or one unix socket."""

    endpoints: tuple[str, ...] = ()
    socket: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    transport: Literal["grpc", "http"] = "grpc"
    """The way there: gRPC, or the JSON gateway where only plain HTTP passes."""
    prefix: str = ""
    """What every key of the fleet begins with in this etcd, if others use it, too: `/lab`."""

    def ssl_context(self) -> "ssl.SSLContext | None":
        """Return the TLS context; host names are checked.

        Raises:
            OSError: a file cannot be read; ssl.SSLError: it is not what it should be.

        """
        if not any(url.startswith("https:") for url in self.endpoints):
            return None
        import ssl  # noqa: PLC0415 - see above

        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    @override
    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else ", ".join(self.endpoints)
