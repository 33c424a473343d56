"""Devices, processes, compiled programs, record files and random numbers."""
