"""Devices, processes, compiled programs, files of records and random numbers."""
