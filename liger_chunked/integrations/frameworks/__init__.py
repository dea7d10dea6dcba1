"""Losses and heads with the interfaces of training frameworks, a file each, compared in docs/frameworks.md.

Each file says with which release of its framework it was run, by the script of its name in `scripts/frameworks`.
"""
