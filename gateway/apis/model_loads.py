"""Loads and unloads of models by clients: what Ollama's pull, LM Studio's and llama-swap's routes have in common."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Final

from fastapi import Request

from gateway import errors
from gateway.apis.ollama.adapter import resolve_name
from gateway.auth.access_control import principal_of
from gateway.forwarding.admission import Activator
from gateway.forwarding.on_demand import OnDemandModels
from gateway.routing.table import ServedModel
from gateway.state.fleet_state import FleetState
from gateway.state.table_cache import TableCache
from machinery.clock import Clock
from schemas.wire.errors import Refusal, RefusedError, invalid

# A large model is fetched over a home's line meanwhile.
_LIMIT_S: Final = 3600.0
_LOOK_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """The state of a load, whenever it changes."""

    text: str
    fetch_bytes: int = 0
    """Bytes of the files that are fetched; 0 while none are."""
    fetched_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoads:
    """Wakes models, asks for those that a policy allows, and releases them."""

    fleet_state: FleetState
    activator: Activator
    on_demand: OnDemandModels
    clock: Clock

    @property
    def table_cache(self) -> TableCache:
        """The routing table."""
        return self.fleet_state.table_cache

    def find(self, request: Request, wanted: str) -> ServedModel:
        """Return the model of this name.

        Raises:
            RefusedError: the client may not use the model, or it does not exist.

        """
        return self.fleet_state.find_model(principal_of(request), self._name(wanted))

    def ask(self, request: Request, wanted: str) -> str:
        """Return the name of a model that exists, or that the reconciler is asked to deploy. Raises as `find`."""
        name, principal = self._name(wanted), principal_of(request)
        self.fleet_state.access.allow(principal, name)
        is_known = name in self.table_cache.table.models
        if is_known or self.on_demand.ask(principal, name):
            return name
        return self.find(request, wanted).name

    def _name(self, wanted: str) -> str:
        """Return the model's own name. Raises RefusedError: it is empty, or the store was not read yet."""
        if not self.table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        name = resolve_name(self.table_cache, wanted)
        if not name:
            raise invalid('"model" must be the name of a model, as a string.', param="model")
        return name

    async def load(self, request: Request, name: str) -> AsyncIterator[LoadProgress]:
        """Wake the model, and yield its progress until it is ready or the client has left.

        Raises:
            RefusedError: it is refused, declared no longer, or not ready within an hour.

        """
        until_s, last = self.clock.monotonic() + _LIMIT_S, LoadProgress(text="")
        while self.clock.monotonic() < until_s:
            model = self.table_cache.table.models.get(name)
            if model is not None and (model.ready() or model.kept()):
                return
            progress = self._await_deployment(name) if model is None else self._wake(model)
            if progress != last:
                yield progress
                last = progress
            await self.table_cache.changed(within_s=_LOOK_S)
            if await request.is_disconnected():
                return
        raise RefusedError(_failed(f"'{name}' is not ready after {_LIMIT_S:.0f} s. {last.text}"))

    def _await_deployment(self, name: str) -> LoadProgress:
        refusal = self.on_demand.refusal(name)
        if refusal is not None:
            raise RefusedError(refusal)
        if not self.on_demand.is_asked(name):
            raise RefusedError(_failed(f"The model '{name}' is declared no longer."))
        self.on_demand.renew(name)
        return LoadProgress(text="the reconciler decides whether to deploy it")

    def _wake(self, model: ServedModel) -> LoadProgress:
        forecasts = [self.table_cache.load_forecast(name) for name in model.deployments()]
        for _, deployment in model.awaited:
            self.activator.note_missing(deployment)
        fetches = [one for one in forecasts if one is not None and one.fetch_bytes]
        if not fetches:
            return LoadProgress(text=model.reason)
        total, arrived = fetches[0].fetch_bytes, fetches[0].fetched_bytes
        return LoadProgress(text=model.reason, fetch_bytes=total, fetched_bytes=arrived)

    def unload(self, models: Iterable[ServedModel]) -> None:
        """Let the idle replicas of the models end now; running requests go on.

        Raises:
            RefusedError: a deployment always keeps a replica.

        """
        names = [name for model in models for name in model.deployments()]
        fixed = [name for name in names if not self.table_cache.may_be_at_zero(name)]
        if fixed:
            named = " ".join(f"md/{name}" for name in fixed)
            raise invalid(
                f"{', '.join(fixed)} always keeps a replica, because spec.autoscaling has no minReplicas: 0. "
                f"`fleetctl scale {named} --replicas=0` ends it."
            )
        self.activator.unload(names)


def _failed(message: str) -> Refusal:
    return Refusal(status=503, message=message, code="model_not_ready", retry_after_s=5)
