"""A sharded engine's other processes: they do what rank 0 does, told over TCP as data.

Rank 0 decides each step (`batch/plan.py`) and sends it before doing it; the others wait for it in a socket, so an idle
group costs nothing, and run the same executor. Never pickle, never a collective for control.
"""
