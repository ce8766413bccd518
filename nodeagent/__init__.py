"""One Mac's agent: watches what is assigned to it, runs engines as child processes, reports what is true."""
