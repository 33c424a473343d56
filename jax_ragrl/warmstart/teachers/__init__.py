"""Teachers of the systems: scripts that play their roles, and builders of supervised rows."""
