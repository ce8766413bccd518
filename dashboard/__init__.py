"""The fleet's recorder: one model of the whole fleet in memory, and the HTTP API from which people and pages read it."""
