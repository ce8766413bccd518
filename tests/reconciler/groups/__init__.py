"""Several Macs as one: how they are chosen, formed and formed again."""
