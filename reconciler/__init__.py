"""Decides which Mac runs which replica, proves that it fits, and says why when it cannot."""
