"""Credit: from the rewards of nodes to one number per node; returns, advantages, adaptive KL."""
