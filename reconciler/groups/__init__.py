"""Several Macs as one: which of them can work together, how a model is split over them, and whether it fits."""
