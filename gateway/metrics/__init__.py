"""Metrics of the gateway, and the facts about responses that they count."""
