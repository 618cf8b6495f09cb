"""Shoal: reinforcement learning of reasoning models across computers that nobody has to trust."""

__version__ = "0.2.0.dev0"
