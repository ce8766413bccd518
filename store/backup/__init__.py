"""All that a fleet keeps, into a file and back."""
