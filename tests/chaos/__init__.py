"""Runs that are killed, damaged, starved of disk and given faulty servers."""
