"""Durations and tokens of requests, by model and replica. No I/O.

A thousand replicas are a thousand times these lines: whatever could be by more than that is not.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from machinery.exposition import Counter, Distribution, Histogram, Series, Tally

# gen_ai.server.time_per_output_token of OpenTelemetry's conventions, without the ends.
_PER_TOKEN_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_WHERE = ("model", "replica")


class Figures:
    """One model's at one replica, found once for all requests: observing must cost next to nothing."""

    __slots__ = (
        "_model",
        "_outcomes",
        "_replica",
        "_served",
        "cached",
        "first_token",
        "output",
        "per_token",
        "prompt",
        "queue",
    )

    def __init__(self, served: "Served", model: str, replica: str) -> None:
        self._served, self._model, self._replica = served, model, replica
        self.queue = served.queue.child(model)
        self.first_token = served.first_token.child(model, replica)
        self.per_token = served.per_token.child(model, replica)
        self.prompt = served.prompt.child(model, replica)
        self.cached = served.cached.child(model, replica)
        self.output = served.output.child(model, replica)
        self._outcomes: dict[str, tuple[Tally, Distribution]] = {}

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a whole request."""
        found = self._outcomes.get(outcome)
        if found is None:
            requests = self._served.requests.child(self._model, outcome)
            whole = self._served.whole.child(self._model, self._replica, outcome)
            found = self._outcomes[outcome] = (requests, whole)
        found[0].count += 1
        found[1].observe(seconds)


class Served:
    """All of them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: of durations, in seconds."""

        def histogram(name: str, help_: str, *labels: str, ends: Sequence[float]) -> Histogram:
            return Histogram(f"fleet_gateway_{name}_seconds", help_, labels, bounds=ends)

        def tokens(kind: str, help_: str) -> Counter:
            return Counter(f"fleet_gateway_{kind}_tokens_total", help_, _WHERE)

        self.requests = Counter(
            "fleet_gateway_requests_total", "Requests by how they ended.", ("model", "outcome")
        )
        self.whole = histogram(
            "e2e_request_latency",
            "From a request's arrival to the last byte of its answer; no replica: nobody answered.",
            *_WHERE,
            "outcome",
            ends=bounds,
        )
        self.first_token = histogram(
            "time_to_first_token",
            "From a request's arrival to the first event of its stream.",
            *_WHERE,
            ends=bounds,
        )
        self.per_token = histogram(
            "time_per_output_token",
            "Between a stream's tokens, mean of each request.",
            *_WHERE,
            ends=_PER_TOKEN_S,
        )
        self.queue = histogram(
            "request_queue_time",
            "How long requests waited here for a place or a replica.",
            "model",
            ends=bounds,
        )
        self.prompt = tokens("prompt", "Tokens of prompts, as in usage.")
        self.cached = tokens("cached", "Tokens of prompts that the engine had read before.")
        self.output = tokens("output", "Tokens of answers, as in usage.")
        self._found: dict[tuple[str, str], Figures] = {}

    def of(self, model: str, replica: str) -> Figures:
        """Return the figures of a model at one replica."""
        key = (model, replica)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = Figures(self, model, replica)
        return found

    def by_replica(self) -> dict[str, tuple[int, float]]:
        """Return how many requests each replica has answered, and how many seconds they took together."""
        found: dict[str, tuple[int, float]] = {}
        for (_, replica, _), one in self.whole.items():
            count, seconds = found.get(replica, (0, 0.0))
            found[replica] = (count + sum(one.counts), seconds + one.total_s)
        return found

    def parts(self) -> tuple[Series, ...]:
        """Return everything that is shown."""
        return (
            self.requests,
            self.whole,
            self.first_token,
            self.per_token,
            self.queue,
            self.prompt,
            self.cached,
            self.output,
        )

    def drop_gone(self, models: AbstractSet[str], replicas: AbstractSet[str]) -> None:
        """Forget what is about a model or a replica that is not among these."""

        def is_gone(labels: tuple[str, ...]) -> bool:
            return labels[0] not in models or labels[1] not in replicas

        for one in (self.whole, self.first_token, self.per_token):
            one.drop(is_gone)
        for count in (self.prompt, self.cached, self.output):
            count.drop(is_gone)
        self.queue.drop(lambda labels: labels[0] not in models)
        self.requests.drop(lambda labels: labels[0] not in models)
        # Begun anew: what is still counted is found again, what was dropped is not kept alive.
        self._found.clear()
