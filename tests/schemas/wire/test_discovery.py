"""Announcements on the local network: their properties, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.wire.discovery import Announcement, parse, render

FLEET, CA = "0f" * 16, "ab" * 32
GOOD = {"v": "1", "role": "control", "name": "mac-1", "fleet": FLEET, "ca": CA}


@pytest.mark.parametrize("announcement", [
    Announcement(role="control", name="mac-1", fleet=FLEET, authorities=(CA, "cd" * 32)),
    Announcement(role="gateway", name="mac-1", is_tls=False),
    Announcement(role="new", name="new-mac.local"),
])  # fmt: skip
def test_an_announcement_is_read_as_it_was_written(announcement: Announcement) -> None:
    properties = render(announcement)
    assert parse(properties) == announcement
    # One string of a TXT record has 255 bytes.
    assert all(len(f"{key}={value}".encode()) <= 255 for key, value in properties.items())


@pytest.mark.parametrize("change", [
    {"v": "2"}, {"v": ""}, {"role": "admin"}, {"role": ""}, {"name": ""}, {"name": "Mac 1"},
    {"name": "a\x1b[2Jb"}, {"name": "a" * 64}, {"fleet": "0f"}, {"fleet": ""},
    {"fleet": FLEET.upper()}, {"ca": ""}, {"ca": "ab" * 31}, {"ca": f"{CA},"},
    {"ca": ",".join([CA] * 4)},
])  # fmt: skip
def test_another_version_and_malformed_properties_are_ignored(change: dict[str, str]) -> None:
    assert parse(GOOD) is not None
    assert parse({**GOOD, **change}) is None


def test_unknown_properties_are_ignored() -> None:
    assert parse({**GOOD, "model": "x" * 200}) == parse(GOOD)


@given(st.dictionaries(st.sampled_from(["v", "role", "name", "fleet", "ca", "tls"]), st.text()))
def test_no_properties_raise(properties: dict[str, str]) -> None:
    announcement = parse({**GOOD, **properties})
    assert announcement is None or announcement.name.isprintable()


def test_nothing_but_the_fleet_is_told() -> None:
    announcement = Announcement(role="control", name="m", fleet=FLEET, authorities=(CA,))
    assert set(render(announcement)) == {"v", "role", "name", "fleet", "ca"}
