"""The running fleet as files: which there will be, and writing them."""
