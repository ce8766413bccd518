"""Tests of gateway/floating_address."""
