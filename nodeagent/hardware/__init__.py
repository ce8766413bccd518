"""Facts and readings of this machine: chip, memory, heat, power, cables. Parsing is pure; one thin reader per system."""
