"""The way to engines: pooled connections and one exchange at a time on each. Knows no models."""
