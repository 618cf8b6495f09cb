"""Shoal: reinforcement learning of reasoning models across computers that nobody has to trust."""

__version__ = "0.1.0"
