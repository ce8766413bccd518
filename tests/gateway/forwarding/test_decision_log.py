"""Debug lines of a gateway: the choices and retries of a request by its id; nothing without the level."""

import logging
from typing import Any

import pytest

from gateway.forwarding.decision_log import DecisionLog
from tests.support.gateway_engine_scripts import chat, dies_at_once
from tests.support.gateway_world import running_gateway

FORM = {"model": "m", "stream": True}


def lines_of(caplog: pytest.LogCaptureFixture, request_id: str) -> list[dict[str, Any]]:
    """Return the fields of the lines about a request."""
    found = [vars(record) for record in caplog.records]
    return [one for one in found if one.get("request_id") == request_id]


async def test_choices_and_retries_are_found_by_the_requests_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "gateway")
    async with running_gateway() as gateway:
        await gateway.serve(dies_at_once, chat)
        for name, body in (("mine", FORM), ("other", {**FORM, "model": "n"})):
            headers = {"x-request-id": name}
            async with gateway.post(json=body, headers=headers) as response:
                await response.read()
    found = lines_of(caplog, "mine")
    assert [one["message"] for one in found] == [
        "endpoint chosen",
        "engine did not serve a request; trying another",
        "endpoint chosen",
        "request is tried again",
    ]
    first, failed, second, again = found
    assert (first["replica"], second["replica"], second["failed"]) == ("m-0", "m-1", "m-0")
    assert failed["outcome"] == "broken"
    assert (again["attempts"], again["free"]) == (1, True)
    candidates = {one["replica"]: one for one in first["candidates"]}
    assert set(candidates) == {"m-0", "m-1"}
    one = candidates["m-1"]
    assert set(one["parts"]) == {"modelLoaded", "memory", "queue"}
    assert one["score"] == pytest.approx(sum(one["parts"].values()), abs=1e-3)
    (unknown,) = lines_of(caplog, "other")
    assert unknown["message"] == "no such model"


async def test_no_line_is_made_without_the_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    assert DecisionLog.if_enabled() is None
    async with running_gateway() as gateway:
        await gateway.serve(chat)
        headers = {"x-request-id": "mine"}
        async with gateway.post(json=FORM, headers=headers) as response:
            assert response.status == 200
            await response.read()
    assert not lines_of(caplog, "mine")
