"""The test of the cables: its words and figures, and real ranks on this machine."""
