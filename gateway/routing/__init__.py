"""Routing: the table and the choice of an endpoint. Pure."""
