"""Sampling from a decoder with static shapes; batching does not change the tokens."""
