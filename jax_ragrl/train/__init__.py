"""What is trained and how: from a config to parts, updates, checkpoints and warm starts."""
