"""Tests of what the benches share; the benches themselves run in `make bench-smoke`."""
