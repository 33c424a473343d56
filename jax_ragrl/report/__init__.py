"""Report of a run: one HTML file without external resources."""

from jax_ragrl.report.build import build_report

__all__ = ["build_report"]
