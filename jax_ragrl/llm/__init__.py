"""The frozen language model of the environment: local, behind a server, or rule-based."""
