"""What every test gets: a fixed hypothesis profile, and models for whole fleets."""

from hypothesis import settings

pytest_plugins = ["tests.support.models"]

settings.register_profile("ci", derandomize=True, max_examples=200, deadline=None)
settings.register_profile("nightly", max_examples=5000, deadline=None)
settings.load_profile("ci")
