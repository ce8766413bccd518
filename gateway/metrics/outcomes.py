"""How requests end, in the words of metrics, journal and API. Values only."""

OUTCOMES = ("ok", "refused", "unavailable", "failed", "interrupted", "client_gone")
"""ok: answered. refused: the client's mistake. unavailable: 429 or 503. failed: another 5xx. interrupted: a stream
that ended before its end. client_gone: its client left first."""

ERRORS = frozenset({"unavailable", "failed", "interrupted"})
"""Those that are no client's doing."""
