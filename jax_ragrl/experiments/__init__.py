"""Experiments: one system from baselines to report, and several systems with several seeds."""
