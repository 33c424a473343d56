"""Scripted teachers of the systems, for the generated encyclopedia."""
