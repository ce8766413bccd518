"""Macs that become nodes, or no longer are nodes, over ssh: their facts, the preflight and the steps."""
