"""What this machine is: chip, cores, memory, addresses. Parsing is pure; reading is one thin file per system."""
