"""Scripted teachers: one module per system, each with a class `Teacher`."""
