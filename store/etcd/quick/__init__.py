"""etcd for whoever asks once and goes: looks, blocks, and imports next to nothing. Knows no watch, no write."""
