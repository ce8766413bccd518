"""Domain-free parts: clock, backoff, work queue, control loop, child processes, logging. Knows no API kind."""
