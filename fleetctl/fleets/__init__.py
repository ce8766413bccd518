"""Running a fleet on this machine (`local_fleet.py` is what `up` runs), and access to the processes of a fleet."""
