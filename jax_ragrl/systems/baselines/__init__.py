"""Systems without a trained policy, for the tables of the papers."""
