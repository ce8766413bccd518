"""Identities of the fleet's processes: certificate authority, certificates, TLS contexts, join tokens."""
