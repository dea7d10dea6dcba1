"""Adapters for transformers and TRL. Only this package imports them, and the package root does not import it."""
