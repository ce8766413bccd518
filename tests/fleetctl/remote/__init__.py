"""Tests of sessions with other Macs."""
