"""From a command's coroutine to what a user reads."""

import pytest

from fleetctl.cli import connect
from fleetctl.cli.errors import FleetctlError
from schemas.deployment import ModelDeployment
from store import codec
from store.errors import ConflictError
from store.port import KeyValue


def test_what_a_newer_fleet_wrote_is_refused_in_one_sentence() -> None:
    newer = KeyValue(key="/k", value=b'{"storedVersion":9}', create_revision=1, mod_revision=1)

    async def read() -> None:
        codec.decode_object(ModelDeployment, newer)

    with pytest.raises(FleetctlError) as caught:
        connect.run(read())
    assert caught.value.message == (
        "/k (ModelDeployment): its stored version is 9, this process reads 1. A newer mlx-fleet "
        "wrote it: upgrade this process to that release"
    )


def test_a_failure_of_the_store_is_a_refusal() -> None:
    async def write() -> None:
        raise ConflictError("what was read has changed since")

    with pytest.raises(FleetctlError, match="Somebody else wrote at the same time"):
        connect.run(write())
