"""Adapters for training frameworks, which the package root does not import."""
