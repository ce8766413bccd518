"""Access control without a gateway: keys in values, and a clock that stands still."""

import hashlib

import pytest

from gateway.auth.access_control import AccessControl
from gateway.auth.keyring import Keyring, Principal
from gateway.auth.rate_limits import openai_headers
from gateway.request import RawHeaders
from machinery.prometheus import Counter
from schemas.records import ApiKey
from schemas.wire.errors import Refusal, RefusedError
from tests.support.clock import FakeClock

ONE_SECRET = "sk-fleet-one"


class Gate:
    """Access control with the keys that a test adds."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.keyring = Keyring(self.clock)
        self.access = AccessControl(self.keyring, self.clock, is_on=True)
        self.access.refusals = self.refusals = Counter("limited", "Refusals.", ["reason"])

    def key(self, secret: str = ONE_SECRET, name: str = "ci", **more: object) -> ApiKey:
        hash_ = hashlib.sha256(secret.encode()).hexdigest()
        return ApiKey(name=name, hash=hash_, created=self.clock.now(), **more)  # type: ignore[arg-type]  # any field

    def has(self, *keys: ApiKey, gateways: int = 1) -> None:
        self.keyring.replace({key.name: key for key in keys}, gateways)

    def enter(self, headers: RawHeaders) -> Principal:
        """Check the key and its limits, as a request does."""
        principal = self.access.identify(headers)
        assert principal is not None
        self.access.admit((principal.limiter,))
        return principal

    @property
    def reasons(self) -> dict[str, int]:
        """The number of refusals by their reason."""
        return {reason: value.count for (reason,), value in self.refusals.items()}

    def headers(self, principal: Principal) -> dict[bytes, bytes]:
        return dict(openai_headers(self.access.rates((principal.limiter,))))

    def refusal(self, secret: str = ONE_SECRET, model: str = "m") -> Refusal:
        with pytest.raises(RefusedError) as caught:
            self.access.allow(self.enter(bearer(secret)), model)
        assert secret not in caught.value.refusal.message
        return caught.value.refusal


def bearer(secret: str) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), (b"authorization", f"Bearer {secret}".encode())]
