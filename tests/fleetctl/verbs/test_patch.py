"""Words of commands that are not UTF-8."""

import pytest

from store.port import Transport
from tests.support.fleetctl_manifests import (
    apply_deployments,
    read_deployment,
)
from tests.support.fleetctl_runner import MemoryFleet

pytestmark = pytest.mark.timeout(120)


async def test_bytes_that_are_not_utf8(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await apply_deployments(shared_fleet, "bytes")
    before = await read_deployment(shared_transport, "bytes")
    made = ("create", "md", "no-text", "--dry-run=client")
    for words, told in (
        (("annotate", "md", "bytes", "x=caf\udce9"), r"x: not UTF-8 at 'caf\udce9'"),
        ((*made, "--model=\udcff"), r"--model: not UTF-8 at '\udcff'"),
        ((*made, "--model=m", "--annotation=a=\udcff"), r"--annotation: not UTF-8 at '\udcff'"),
        ((*made, "--model=m", "--served-name=\udcff"), r"--served-name: not UTF-8 at '\udcff'"),
    ):
        done = await shared_fleet.ctl(*words)
        assert (done.code, done.out) == (2, "")
        assert told in " ".join(done.err.split())
    assert await read_deployment(shared_transport, "bytes") == before
