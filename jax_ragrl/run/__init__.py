"""A run: its configuration, its components, inference, evaluation and guards."""
