"""Discovery of fleets: static seeds, the local network and Tailscale suggest addresses, and TLS proves them."""
