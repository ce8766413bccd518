"""etcd over gRPC: the default transport, and administration."""

import os

# grpc's core reads this when it is loaded. It would write every failure to stderr, and failures are raised as
# errors anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# With fork support, grpc's threads restart in every child between fork and exec, which crashed now and then (signal
# 11 in event_engine). Children never continue a connection, so it is off.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
