"""Has a request answered: tries engines in turn, holds places and counts. Sends clients nothing itself."""
