"""Carries the worker's words over to the event loop. The only code of the service that runs in the worker's thread."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.jobs import WorkerEvent
from engine.ports import ServedModel

if TYPE_CHECKING:
    from engine.service import Service


@dataclass(frozen=True, slots=True)
class LoopListener:
    """Implements `Listener`: each method only hops over."""

    loop: asyncio.AbstractEventLoop
    service: "Service"

    def on_met(self, lines: Mapping[int, socket.socket]) -> None:
        """Pass the lifelines on."""
        if self.service.lifelines is not None:
            self.loop.call_soon_threadsafe(self.service.lifelines.met, lines)

    def on_loading(self) -> None:
        """Say that the ranks are connected."""
        self.loop.call_soon_threadsafe(self.service.loads)

    def on_ready(self, ready: ServedModel) -> None:
        """Say that jobs may come."""
        self.loop.call_soon_threadsafe(self.service.became_ready, ready)

    def on_events(self, events: list[WorkerEvent]) -> None:
        """Pass on what a step made."""
        self.loop.call_soon_threadsafe(self.service.deliver, events)

    def on_end(self, error: Exception | None) -> None:
        """Say that the thread is over."""
        self.loop.call_soon_threadsafe(self.service.worker_ended, error)
