"""Formats that processes exchange. Each format is one frozen record that the receiver parses once. Imports no torch."""
