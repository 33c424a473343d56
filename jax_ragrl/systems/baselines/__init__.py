"""Baselines of the papers: systems of frozen roles, and systems trained with the shared parts."""
