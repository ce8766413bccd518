"""What the gateway counts and remembers of its requests. Changes none."""
