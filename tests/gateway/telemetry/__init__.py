"""Tests of journal and traces."""
