"""The flag --identity-dir of the three programs."""

from pathlib import Path

import click
import pytest

from identity.flags import identity_folder, read_identity
from identity.names import Role
from machinery.clock import SystemClock
from tests.support.identities import TestAuthority
from tests.support.values import present


def test_a_folder_without_a_certificate_is_no_identity_yet(tmp_path: Path) -> None:
    folder = present(identity_folder(None, tmp_path / "identity"))
    assert read_identity(folder, Role.NODE, SystemClock()) is None
    assert identity_folder(None) is None


def test_the_identity_of_another_part_is_refused(tmp_path: Path) -> None:
    folder = TestAuthority(tmp_path).issue(Role.GATEWAY, "edge")
    assert read_identity(folder, Role.GATEWAY, SystemClock()) is not None
    with pytest.raises(click.UsageError, match="needs the identity of a node"):
        read_identity(folder, Role.NODE, SystemClock())


def test_an_identity_that_other_users_may_read_is_refused(tmp_path: Path) -> None:
    folder = TestAuthority(tmp_path).issue(Role.GATEWAY, "edge")
    folder.identity.chmod(0o644)
    with pytest.raises(click.UsageError, match="chmod 600"):
        read_identity(folder, Role.GATEWAY, SystemClock())
