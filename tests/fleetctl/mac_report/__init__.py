"""Tests of the report of a Mac."""
