"""The stateful half of the Responses API: responses stored per API key, continued, and run in the background."""
