"""Encoders of BERT's kind: embedding models and cross-encoders, whole texts at a time."""
