"""A floating address: an IPv4 address for clients that the gateways of a fleet hold in turn (ADR 0026)."""
