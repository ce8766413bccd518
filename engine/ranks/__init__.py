"""The ranks of a sharded engine: rank 0 sends its step plans over TCP as data, and the other ranks execute them.

The other ranks wait in a socket, so an idle group costs nothing. Control never uses pickle or a collective.
"""
