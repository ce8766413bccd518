"""Tests of `reconciler.listers.caches`: a change is news unless the reconcile of the deployment made it itself."""

from contextlib import suppress

import pytest

from reconciler.listers.caches import OwnWrites
from schemas.meta import Status
from store import codec
from store.port import KeyValue


@pytest.fixture
def own() -> OwnWrites:
    return OwnWrites()


def item(value: bytes, key: str = "/k") -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=1, mod_revision=9)


def test_a_change_of_others_is_news(own: OwnWrites) -> None:
    heard: list[str] = []
    own.report(7, "qwen", lambda: heard.append("qwen"))
    assert heard == ["qwen"]


def test_an_own_change_is_none(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("qwen") as note:
        note(7)
    own.report(7, "qwen", lambda: heard.append("own"))
    own.report(8, "qwen", lambda: heard.append("later"))
    own.report(7, "llama", lambda: heard.append("preempted"))
    assert heard == ["later", "preempted"]


def test_a_watch_may_be_faster_than_the_answer(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("qwen") as note:
        own.report(7, "qwen", lambda: heard.append("own"))
        own.report(6, "qwen", lambda: heard.append("of others"))
        assert heard == []
        note(7)
    assert heard == ["of others"]


def test_two_writes_may_be_made_at_once(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("qwen") as note:
        with own.writing("llama") as note_other:
            own.report(7, "qwen", lambda: heard.append("own"))
            own.report(6, "qwen", lambda: heard.append("of others"))
            note_other(8)
        own.report(8, "llama", lambda: heard.append("own, too"))
        assert heard == []
        note(7)
    assert heard == ["of others"]


def test_a_write_without_answer_is_news(own: OwnWrites) -> None:
    heard: list[str] = []
    with suppress(TimeoutError), own.writing("qwen"):
        own.report(7, "qwen", lambda: heard.append("during"))
        raise TimeoutError
    own.report(7, "qwen", lambda: heard.append("after"))
    assert heard == ["during", "after"]


def test_a_write_for_nobody_is_news(own: OwnWrites) -> None:
    heard: list[str] = []
    with own.writing("") as note:
        note(7)
    own.report(7, "", lambda: heard.append("news"))
    assert heard == ["news"]


def test_a_document_is_recognized_once_and_by_its_bytes(own: OwnWrites) -> None:
    status = Status(observed_generation=3)
    written = codec.encode(status)
    own.expect({"/k": (written, status), "/other": (written, status)})
    assert own.take(item(written)) is status
    assert own.take(item(written)) is None
    assert own.take(item(written + b" ", "/other")) is None
    assert own.take(item(written, "/other")) is None
