"""Exports a policy in Hugging Face format, with a model card, and publishes it on the Hub."""

from jax_ragrl.export.weights import ExportResult, export, export_adapter, max_logit_difference

__all__ = ["ExportResult", "export", "export_adapter", "max_logit_difference"]
