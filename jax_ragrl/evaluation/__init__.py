"""Tables of systems and baselines on one or several question sets."""
