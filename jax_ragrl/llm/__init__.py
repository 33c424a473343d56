"""The frozen language model as environment."""
