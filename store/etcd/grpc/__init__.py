"""etcd over gRPC: what the fleet uses."""

import os

# grpc's core reads this when it is loaded, and would write to stderr whatever fails; all of that
# also comes to us as errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
