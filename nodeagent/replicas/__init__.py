"""One replica on this node: observed values, the tracked state of its engine, epoch health, and reports."""
