"""etcd over gRPC: what the fleet uses."""

import os

# grpc's core reads this when it is loaded, and would write to stderr whatever fails; all of that
# also comes to us as errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its threads would begin anew in every child between fork and exec, and crash there now and then (signal 11 in
# event_engine, seen): children of ours never go on with a connection.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
