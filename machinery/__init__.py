"""Domain-free parts of every process: clocks, queues, control loop, child processes, logs, HTTP. Knows no API kind."""
