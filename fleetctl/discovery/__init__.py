"""Where a fleet may be: static seeds, the local network and Tailscale suggest addresses, and TLS proves them."""
