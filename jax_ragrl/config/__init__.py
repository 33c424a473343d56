"""The configuration: from a Python file with overrides to frozen dataclasses."""
