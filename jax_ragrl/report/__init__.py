"""A run as one HTML file that opens offline: `build_report(workdir)`."""

from jax_ragrl.report.build import build_report

__all__ = ["build_report"]
