"""What a gateway knows of its fleet, and how it gets by without the store."""
