"""Checks of a set-up before a run: everything that is wrong at once, before anything is spent."""
