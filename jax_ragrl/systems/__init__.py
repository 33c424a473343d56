"""The systems of the papers: each with its steps, its grammars, and a table of choices."""
