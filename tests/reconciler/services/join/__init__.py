"""Tests of the join port."""
