"""The agent's HTTP API: health, metrics, vitals and logs."""
