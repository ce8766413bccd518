"""The wire between processes: headers, exit codes, engine flags, metric names, error envelope. Values and pure helpers.

Each name that two processes must spell alike is defined here once. Importing a module of this package must stay cheap,
because fleetctl does.
"""
