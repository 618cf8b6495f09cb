"""Shells around the network: deadlines, the signed client, the server loop, the object store. No torch here."""
