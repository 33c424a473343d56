"""Passages and questions: their file formats, and the generated encyclopedia."""
