"""The clients that are compared, what each needs, and what it cannot take part in."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Way:
    """One client, in one setting."""

    name: str
    module: str
    """In `bench.store.clients`."""
    option: str = ""
    requires: tuple[str, ...] = ()
    """Packages that pip installs for it; none for ours, which runs in our own environment."""
    is_http: bool = False
    is_slow: bool = False
    """One round is enough: it is far behind, and would eat the others' time."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of cases, and why it cannot take part in those."""

    @property
    def is_ours(self) -> bool:
        return not self.requires

    def reason_to_skip(self, case: str) -> str | None:
        return next((why for start, why in self.skips.items() if case.startswith(start)), None)


# Which version is compared is part of the result; what they are built on is pinned to our own.
PEERS = (
    Way(name="grpc.aio stubs", module="grpc_stubs", requires=("aetcd==1.0.0",)),
    Way(name="aetcd 1.0.0", module="aetcd", requires=("aetcd==1.0.0",)),
    Way(
        name="etcd3-py 0.1.6",
        module="etcd3_py",
        requires=("etcd3-py==0.1.6",),
        is_http=True,
        is_slow=True,
        skips={
            "list": "about 10 s for 5,000 keys, and it has no pages",
            "fanout": "loses events of a burst",
            "leases": "its keepalive raises",
        },
    ),
)


# The default first.
OURS = (
    Way(name="ours grpc", module="ours", option="grpc"),
    Way(name="ours http", module="ours", option="http", is_http=True),
)
