"""Admin API: workers, statistics, requests, log. Read-only."""
