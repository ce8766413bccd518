"""Autoscaling: how many replicas a deployment should have, from demand, schedule and time. Pure."""
