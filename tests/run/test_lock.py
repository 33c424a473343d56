"""Laws of the lock on a work folder."""

import multiprocessing
import os
import pathlib

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.run.lock import FILE, lock_folder, unlock_folder


def _lock(folder: pathlib.Path) -> str:
    try:
        lock_folder(folder)
    except UserError as error:
        return str(error)
    return ""


def _elsewhere(folder: pathlib.Path) -> str:
    """The outcome of `lock_folder` in another process, which then ends."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_lock, (folder,))


def test_one_process_at_a_time_holds_a_folder(tmp_path):
    folder = tmp_path / "run"
    lock_folder(folder)
    lock_folder(folder)  # its own lock is no obstacle
    message = _elsewhere(folder)
    assert f"in use by process {os.getpid()}" in message and "another --workdir" in message
    unlock_folder(folder)
    assert _elsewhere(folder) == "" and (folder / FILE).exists()
    lock_folder(folder)  # that process has ended
    unlock_folder(folder)


def test_a_file_system_without_locks_is_not_locked(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr("jax_ragrl.run.lock.fcntl.flock", refuse)
    lock_folder(tmp_path)


def test_unlocking_what_is_not_locked_does_nothing(tmp_path):
    unlock_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        (tmp_path / FILE).stat()
