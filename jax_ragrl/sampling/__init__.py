"""The jitted sampler: static shapes, and keys that depend on nothing else in a batch."""
