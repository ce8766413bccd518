"""Errors of the store become messages for users."""

import pytest

from fleetctl.cli import connect
from fleetctl.cli.errors import FleetctlError
from schemas.deployment import ModelDeployment
from store import codec, versions
from store.errors import ConflictError
from store.port import KeyValue


def test_a_newer_document_is_an_error_in_one_sentence() -> None:
    current = versions.version_of("ModelDeployment")
    value = b'{"storedVersion":%d}' % (current + 1)
    newer = KeyValue(key="/k", value=value, create_revision=1, mod_revision=1)

    async def read() -> None:
        codec.decode_object(ModelDeployment, newer)

    with pytest.raises(FleetctlError) as caught:
        connect.run(read())
    assert caught.value.message == (
        f"/k (ModelDeployment): its stored version is {current + 1}, this process reads {current}. "
        "A newer mlx-fleet wrote it: upgrade this process to that release"
    )


def test_store_errors_become_messages_with_advice() -> None:
    async def write() -> None:
        raise ConflictError("what was read has changed since")

    with pytest.raises(FleetctlError, match="Another writer changed the object at the same time"):
        connect.run(write())
