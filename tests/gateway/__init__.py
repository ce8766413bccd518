"""Tests of the gateway, with fake engines and with real ones."""
