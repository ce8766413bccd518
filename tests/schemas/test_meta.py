"""Tests of `schemas.meta`: names, labels and conditions."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.meta import (
    Condition,
    ConditionStatus,
    ObjectKey,
    ObjectMeta,
    find_condition,
    is_true,
    with_condition,
)
from tests.support.values import present

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("name", ["a", "0", "a-b", "a.b", "a--b", "qwen3-8b.v2", "a" * 128])
def test_valid_names_are_accepted(name: str) -> None:
    assert ObjectMeta(name=name).name == name


@pytest.mark.parametrize("name", [
    "", "-a", "a-", ".a", "a.", "A", "a_b", "a/b", "..", "a b", "a\n", "ä", "a" * 129, "a\0",
])  # fmt: skip
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        ObjectMeta(name=name)


@pytest.mark.parametrize(
    ("key", "value"),
    [("a", ""), ("fleet/node", "a"), ("example.com/Rack_1", "A.b-C_9"), ("a" * 128, "v" * 63)],
)
def test_valid_labels_are_accepted(key: str, value: str) -> None:
    assert ObjectMeta(name="a", labels={key: value}).labels == {key: value}


@pytest.mark.parametrize(("key", "value"), [
    ("", "v"), ("a/", "v"), ("/a", "v"), ("a/b/c", "v"), ("A/b", "v"), ("-a", "v"), ("a b", "v"),
    ("k" * 129, "v"), ("a", "-v"), ("a", "v-"), ("a", "v w"), ("a", "v/w"), ("a", "v\n"),
    ("a", "v" * 64),
])  # fmt: skip
def test_invalid_labels_are_refused(key: str, value: str) -> None:
    with pytest.raises(ValidationError, match="labels"):
        ObjectMeta(name="a", labels={key: value})


def test_metadata_is_frozen_and_strict() -> None:
    meta = ObjectMeta(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        meta.name = "b"  # type: ignore[misc]
    for text in (
        '{"name": "a", "generation": "1"}',
        '{"name": "a", "colour": "red"}',
        '{"name": 7}',
        '{"name": "a", "labels": {"a": 7}}',
        '{"name": "a", "annotations": {"a": null}}',
        '{"name": "a", "deletionTimestamp": "soon"}',
        "{}",
    ):
        with pytest.raises(ValidationError):
            ObjectMeta.model_validate_json(text)


def test_both_spellings_are_read_and_camel_case_is_written() -> None:
    camel = ObjectMeta.model_validate_json('{"name": "a", "resourceVersion": "7"}')
    snake = ObjectMeta.model_validate_json('{"name": "a", "resource_version": "7"}')
    assert camel == snake
    assert '"resourceVersion":"7"' in camel.model_dump_json(by_alias=True)


def test_an_object_key_is_shown_as_kind_and_name() -> None:
    assert str(ObjectKey("Node", "a")) == "Node/a"


def condition(
    type_: str = "Ready",
    status: ConditionStatus = ConditionStatus.TRUE,
    *,
    minute: int = 0,
    reason: str = "Said",
) -> Condition:
    return Condition(
        type=type_,
        status=status,
        reason=reason,
        observed_generation=minute,
        last_transition_time=NOON + timedelta(minutes=minute),
    )


def test_the_transition_time_stays_while_the_status_stays() -> None:
    (found,) = with_condition([condition()], condition(minute=5, reason="Other"))
    assert found.last_transition_time == NOON
    assert (found.reason, found.observed_generation) == ("Other", 5)


@pytest.mark.parametrize("status", [ConditionStatus.FALSE, ConditionStatus.UNKNOWN])
def test_the_transition_time_changes_with_the_status(status: ConditionStatus) -> None:
    (found,) = with_condition([condition()], condition(status=status, minute=5))
    assert found.last_transition_time == NOON + timedelta(minutes=5)


conditions = st.builds(
    condition, st.sampled_from("ABCD"), st.sampled_from(ConditionStatus), minute=st.integers(0, 60)
)


@given(st.lists(conditions), conditions)
def test_conditions_are_unique_by_type_sorted_and_stable(
    old: list[Condition], new: Condition
) -> None:
    first: tuple[Condition, ...] = ()
    for one in old:
        first = with_condition(first, one)
    found = with_condition(first, new)
    types = [c.type for c in found]
    assert types == sorted(set(types))
    assert {c for c in found if c.type != new.type} == {c for c in first if c.type != new.type}
    now = present(find_condition(found, new.type))
    assert now.status == new.status
    assert with_condition(found, now) == found
    assert is_true(found, new.type) == (new.status == ConditionStatus.TRUE)


def test_a_missing_condition_is_not_true() -> None:
    assert find_condition([condition("A")], "B") is None
    assert not is_true([condition("A")], "B")
