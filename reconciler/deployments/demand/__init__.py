"""Demand of deployments and results of their versions, as the gateways measure them."""
