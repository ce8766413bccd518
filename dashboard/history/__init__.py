"""The last 24 hours of a fleet in one SQLite file: series, requests and objects."""
