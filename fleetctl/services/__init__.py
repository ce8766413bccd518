"""The fleet's programs as services of the machine, and the settings of the machine that they need."""
