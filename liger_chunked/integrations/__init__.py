"""The room of the frameworks: the only one that imports transformers or trl, and never from the package root."""
