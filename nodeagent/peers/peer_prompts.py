"""Reading of an engine's last prompts from the agent of another node over TLS."""

import ssl

import aiohttp
from pydantic import ValidationError

from identity.dialer import Dialer, UntrustedAddressError
from machinery.http_body import read_limited
from nodeagent.peers.peer_blobs import PeerError, peer_error
from schemas.wire.recent_prompts import MAX_BODY_BYTES, PATH, RecentPrompts

_TIMEOUT = aiohttp.ClientTimeout(total=4.0, sock_connect=2.0)


class HttpPeerPrompts:
    """The prompts of other nodes' engines, over the agents' API."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    async def read(self, node: str, url: str, replica: str) -> RecentPrompts:
        """Return the last prompts of a replica on a node.

        Raises:
            PeerError: the node did not answer, refused or sent something else.

        """
        try:
            dial = self._dialer.node(node, url)
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT) as http,
                http.get(
                    f"{url}{PATH}/{replica}",
                    ssl=dial.ssl,
                    server_hostname=dial.server_hostname,
                    allow_redirects=False,
                ) as response,
            ):
                body = await read_limited(response.content.iter_any(), MAX_BODY_BYTES)
                if response.status != 200:
                    text = body[:200].decode("utf-8", "replace")
                    raise PeerError(f"{node} answered {response.status}: {text}")
            return RecentPrompts.model_validate_json(body)
        except (TimeoutError, aiohttp.ClientError, ssl.SSLError, OSError) as error:
            raise peer_error(node, url, error) from error
        except UntrustedAddressError as error:
            raise PeerError(f"{node}: {error}") from error
        except ValidationError as error:
            # Its text has the values, which are what clients wrote.
            count = error.error_count()
            raise PeerError(f"{node} sent prompts with {count} wrong values") from None
