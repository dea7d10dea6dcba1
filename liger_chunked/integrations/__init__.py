"""Integrations: Hugging Face models, TRL, and training frameworks."""
