"""External endpoints: OpenAI servers that the fleet did not start, as backends of a ModelRoute."""

import ipaddress
from typing import Annotated, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from schemas.meta import ApiModel, Examples, ObjectName

_SCHEMES = {"http": 80, "https": 443}
# RFC 1035, without the dots at both ends. Recorders refuse requests whose endpoint is much longer.
_LONGEST_HOST = 253
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class ServerAddress(NamedTuple):
    """The parts of an external server's URL."""

    is_tls: bool
    host: str
    port: int
    path: str
    """Without a slash at its end, such as "/v1"; may be empty."""

    @property
    def origin(self) -> str:
        """The URL without its path; the port is always there."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"

    @property
    def is_private(self) -> bool:
        """True if the address is on this machine or in a private network. Names other than localhost are not."""
        try:
            address = ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return self.host == "localhost"
        return address.is_private and not address.is_unspecified


def parse_url(url: str) -> ServerAddress:
    """Return the parts of the URL.

    Raises:
        ValueError: it is no address of a server; the message says what is expected.

    """
    expected = "expected an address such as https://api.example.com/v1 or http://10.0.0.9:11434/v1"
    if not url.isascii() or not url.isprintable() or any(one in url for one in ' "<>\\^`{|}@'):
        raise ValueError(f"{url[:100]!r}: {expected}, without spaces, users and passwords")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url[:100]!r}: {error}; {expected}") from error
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url[:100]!r}: {expected}")
    if len(parts.hostname) > _LONGEST_HOST:
        raise ValueError(
            f"{url[:100]!r}: the name of the server has {len(parts.hostname)} characters; DNS has at most "
            f"{_LONGEST_HOST}; {expected}"
        )
    return ServerAddress(
        is_tls=parts.scheme == "https",
        host=parts.hostname,
        port=_SCHEMES[parts.scheme] if port is None else port,
        path=parts.path.rstrip("/"),
    )


def _checked_url(url: str) -> str:
    parse_url(url)
    return url


def _checked_certificates(text: str) -> str:
    if text.count(_BEGIN) != text.count(_END) or _BEGIN not in text:
        raise ValueError(f"expected certificates in PEM form: {_BEGIN} ... {_END}")
    import ssl  # noqa: PLC0415 - only for routes with an authority

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"these certificates cannot be read: {error}") from error
    return text


ServerUrl = Annotated[
    str,
    Field(max_length=1000),
    AfterValidator(_checked_url),
    Examples(("https://api.openai.com/v1", "http://10.0.0.9:11434/v1", "http://127.0.0.1:8080")),
]


class ExternalEndpoint(ApiModel):
    """An OpenAI server that the fleet did not start: LocalAI, exo, Ollama, LM Studio, a cloud API."""

    name: ObjectName
    """Its name within the route, for backends and fallbacks."""
    url: ServerUrl
    """Base address of its API, as OpenAI's clients take it, such as "https://api.openai.com/v1"."""
    model: Annotated[str, Field(min_length=1, max_length=300)]
    """The model's name there."""
    key: ObjectName | None = None
    """Its API key: a name given to `fleetctl create externalkey`. Default: requests carry no key."""
    allow_plaintext_key: bool = False
    """Send the key without TLS to a host that is neither this machine nor a private address."""
    authorities: (
        Annotated[str, Field(max_length=65_536), AfterValidator(_checked_certificates)] | None
    ) = None
    """Certificates in PEM form that its certificate must lead to. Default: those that the gateway's machine trusts."""
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Requests that it is expected to process at once."""

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        address = parse_url(self.url)
        if self.authorities is not None and not address.is_tls:
            raise ValueError(f"authorities: {self.url} is not https; remove authorities")
        if self.allow_plaintext_key and (self.key is None or address.is_tls):
            raise ValueError("allowPlaintextKey allows nothing here; remove it")
        if self.key is None or address.is_tls or address.is_private or self.allow_plaintext_key:
            return self
        raise ValueError(
            f"key: {address.host} would get the key without TLS; use https, a loopback or private IP address, or set "
            "allowPlaintextKey"
        )
