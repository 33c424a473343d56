"""A question becomes a tree: effects, roles, the loop that performs them, the forest it leaves."""
