"""Runs that are killed, paused, damaged, starved of disk and given faulty servers.

`python -m tests.chaos --help` lists the parts; the tests of this folder run a small fixed share.
"""
