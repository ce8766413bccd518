"""Identity, registration and status of the node that the agent runs on."""
