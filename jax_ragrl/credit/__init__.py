"""From what nodes and leaves earned to one number a node: returns, advantages, the adaptive KL."""
