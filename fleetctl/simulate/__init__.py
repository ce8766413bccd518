"""An invented fleet: its file, its life in virtual time, and what is told of it. Touches no store but its own."""
