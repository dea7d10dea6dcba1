"""Adapters for training frameworks. Only this package imports them, and the package root does not import it."""
