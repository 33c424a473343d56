"""Systems that the papers compare with: of frozen roles, and trained on the same parts."""
