"""The reconciler: decides which node runs which replica, proves that it fits, and explains why it cannot."""
