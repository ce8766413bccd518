"""The members of an etcd cluster, and a check whether their versions may form one."""

from dataclasses import dataclass

from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc import wire
from store.etcd.grpc.admin import MaintenanceClient, member_addresses
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.member.binary import parse_version_number, unfit_for_clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMember:
    """One member, as the cluster knows it."""

    id: int
    name: str
    """Empty until the member has started for the first time."""
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]
    is_learner: bool


class UnfitVersionError(StoreError):
    """An etcd of this version must not be a member of a cluster; the message says why."""


class ClusterClient:
    """Membership calls, through any endpoint that answers. Close it after use.

    Every call raises `UnavailableError` without an answer, and other `StoreError`s for etcd's errors.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._channel = GrpcChannel(address)

    async def close(self) -> None:
        await self._channel.close()

    async def list(self) -> tuple[ClusterMember, ...]:
        answer = await self._channel.call(wire.MEMBER_LIST, pb.Empty())
        return tuple(map(_member, answer.members))

    async def refuse_unfit(self) -> None:
        """Refuse a cluster with an endpoint whose version must be the only member.

        Raises:
            UnfitVersionError: an endpoint that answers has such a version.

        """
        for address in member_addresses(self._address):
            client = MaintenanceClient(address)
            try:
                version = (await client.status()).version
            except StoreError:
                continue  # a member that is down is checked when it joins
            finally:
                await client.close()
            reason = unfit_for_clusters(parse_version_number(version))
            if reason:
                raise UnfitVersionError(f"etcd at {address} is {version}: {reason}")


def _member(found: pb.Member) -> ClusterMember:
    return ClusterMember(
        id=found.id,
        name=found.name,
        peer_urls=tuple(found.peer_urls),
        client_urls=tuple(found.client_urls),
        is_learner=found.is_learner,
    )
