"""One replica on this node: what is observed, tracked and reported of its engine."""
