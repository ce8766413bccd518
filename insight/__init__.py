"""Questions about a fleet that people ask, answered once for the command line and for the recorder."""
