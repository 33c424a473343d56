"""The systems of the papers: each a state machine, its grammars, and a table of choices."""
