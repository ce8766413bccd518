"""Whole fleets of real processes: what must be shown of them."""
