"""Tests of identities: names, certificates, connections, tokens."""
