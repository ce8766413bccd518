"""Running a fleet on this machine, and access to the processes of a fleet."""
