"""What every test gets: a fixed hypothesis profile."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, max_examples=200, deadline=None)
settings.register_profile("nightly", max_examples=5000, deadline=None)
settings.load_profile("ci")
