"""Eager oracles: the same losses on full logits, written from the formula, on torch alone."""
