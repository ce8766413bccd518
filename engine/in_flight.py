"""Requests in flight: the phase and the progress of each, and cancellation by id. Event loop only."""

from collections.abc import Iterable, Mapping

from engine.admission import Admission, Ticket
from engine.jobs import Job
from engine.request_log import RequestRecord
from schemas.wire import errors
from schemas.wire.in_flight import (
    MAX_REQUESTS,
    InFlightRequest,
    InFlightRequests,
    RequestPhase,
)


def report(
    records: Iterable[RequestRecord], prompt_positions: Iterable[tuple[int, int]], now_s: float
) -> InFlightRequests:
    """Return the requests with these records, oldest first. Pure.

    `prompt_positions` are those of the worker: a job without one has not begun.
    """
    request_records, positions = tuple(records), dict(prompt_positions)
    return InFlightRequests(
        requests=tuple(
            _describe(record, positions, now_s) for record in request_records[:MAX_REQUESTS]
        ),
        total=len(request_records),
    )


def _describe(record: RequestRecord, positions: Mapping[int, int], now_s: float) -> InFlightRequest:
    ticket = record.ticket
    return InFlightRequest(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model[:200],
        phase=_phase(ticket),
        seconds=round(max(0.0, now_s - record.begun_s), 3),
        prompt_tokens=0 if ticket is None else ticket.prompt_tokens,
        prefilled_tokens=0 if ticket is None else _prefilled(ticket, positions),
        generated_tokens=0 if ticket is None else ticket.completion_tokens,
        trace_id=record.trace_id,
    )


def _phase(ticket: Ticket | None) -> RequestPhase:
    if ticket is None or ticket.started_s is None:
        return "queued"
    return "prefill" if ticket.first_s is None else "generating"


def _prefilled(ticket: Ticket, positions: Mapping[int, int]) -> int:
    """Return the tokens read of the request's prompts. A prompt that several jobs continue counts once."""
    if ticket.first_s is not None:
        return ticket.prompt_tokens
    read: dict[tuple[int, ...], int] = {}
    for job in ticket.jobs:
        if isinstance(job, Job):
            # Tokens that another engine had generated are read as well; they are no part of the prompt.
            position = min(positions.get(job.id, 0), len(job.prompt))
            read[job.prompt] = max(read.get(job.prompt, 0), position)
    return sum(read.values())


def cancel(records: Iterable[RequestRecord], admission: Admission, request_id: str) -> int:
    """End the requests with this id; return their number.

    One whose input is still prepared ends when that is done, without a slot.
    """
    refusal, cancelled = errors.cancelled(), 0
    for record in records:
        if record.id != request_id or record.cancellation is not None:
            continue
        record.cancellation = refusal
        if record.ticket is not None:
            admission.refuse(record.ticket, refusal)
        cancelled += 1
    return cancelled
