"""GitSources: fetching from real servers, and what a leader makes of commits."""
