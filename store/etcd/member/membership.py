"""Which members an etcd cluster has: look, add, promote, move, remove.

A member joins as a learner, which has no vote, and votes when it has caught up: a member that is
added with a vote and does not come up can cost a small cluster its quorum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc import wire
from store.etcd.grpc.admin import MaintenanceClient, member_addresses
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.member.binary import parse_version_number, unfit_for_clusters

# etcd answers a change of members when a majority has it.
_CHANGE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMember:
    """One member, as the cluster knows it."""

    id: int
    name: str
    """Empty until it was started for the first time."""
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]
    is_learner: bool


class UnfitVersionError(StoreError):
    """An etcd of this version must not be one of several members; the message says why."""


class ClusterClient:
    """Changes of a cluster's members, through whichever endpoint answers. To be closed.

    Every call raises `UnavailableError` if there is no answer, and other `StoreError`s as etcd says.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._channel = GrpcChannel(address)

    async def close(self) -> None:
        await self._channel.close()

    async def list(self) -> tuple[ClusterMember, ...]:
        answer = await self._channel.call(wire.MEMBER_LIST, pb.Empty())
        return tuple(map(_member, answer.members))

    async def add_learner(self, peer_urls: Sequence[str]) -> ClusterMember:
        """Announce a member that will be started at these URLs; it has no vote yet.

        Raises:
            UnfitVersionError: a member that answers is an etcd that must stay alone.

        """
        await self.refuse_unfit()
        request = pb.MemberAddRequest(peer_urls=peer_urls, is_learner=True)
        answer = await self._channel.call(wire.MEMBER_ADD, request, limit_s=_CHANGE_S)
        return _member(answer.member)

    async def promote(self, member: int) -> bool:
        """Give a learner its vote; return whether it has it, for it must have caught up first."""
        try:
            request = pb.MemberRequest(id=member)
            await self._channel.call(wire.MEMBER_PROMOTE, request, limit_s=_CHANGE_S)
        except StoreError as error:
            if "in sync with leader" in str(error):
                return False
            raise
        return True

    async def update(self, member: int, peer_urls: Sequence[str]) -> None:
        """Say where a member's peers find it from now on."""
        request = pb.MemberUpdateRequest(id=member, peer_urls=peer_urls)
        await self._channel.call(wire.MEMBER_UPDATE, request, limit_s=_CHANGE_S)

    async def remove(self, member: int) -> None:
        """Take a member out; it ends by itself when it hears of it."""
        request = pb.MemberRequest(id=member)
        await self._channel.call(wire.MEMBER_REMOVE, request, limit_s=_CHANGE_S)

    async def refuse_unfit(self) -> None:
        """Refuse if one of the endpoints that answer is an etcd that must stay alone.

        Raises:
            UnfitVersionError: so it is.

        """
        for one in member_addresses(self._address):
            member = MaintenanceClient(one)
            try:
                version = (await member.status()).version
            except StoreError:
                continue  # who is down is asked when it joins something
            finally:
                await member.close()
            reason = unfit_for_clusters(parse_version_number(version))
            if reason:
                raise UnfitVersionError(f"etcd at {one} is {version}: {reason}")


def _member(found: pb.Member) -> ClusterMember:
    return ClusterMember(
        id=found.id,
        name=found.name,
        peer_urls=tuple(found.peer_urls),
        client_urls=tuple(found.client_urls),
        is_learner=found.is_learner,
    )
