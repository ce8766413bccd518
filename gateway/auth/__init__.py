"""Authentication, authorization and rate limits by API key. Knows nothing about engines."""
