"""The catalogue of well-known models. Data: catalogue.json."""
