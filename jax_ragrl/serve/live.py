"""HTTP server of a report that follows its run; only this machine reaches it.

  GET /           the report; its script asks for the version and replaces the page when it changes
  GET /version    changes when the run has written something
  GET /explorer   the predictions and trees so far

Pages are rendered from the files of the run, which may belong to a run on another machine.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.routing import Route

from jax_ragrl.errors import UserError
from jax_ragrl.report.build import Live, render
from jax_ragrl.report.explorer import explorer_page, has_pages
from jax_ragrl.report.load import CONFIG, METRICS, SUMMARY, TREES, RunData, load_run
from jax_ragrl.run.predictions import FOLDER
from jax_ragrl.serve.guard import Access, Guard
from jax_ragrl.serve.http import listen, make_application

HOST = "127.0.0.1"  # reports show texts of corpora, so other machines need a tunnel
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the pages have their own policies
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve_report(folders: Sequence[pathlib.Path], port: int) -> None:
    """Serves the report of a run until SIGTERM or SIGINT.

    Args:
      folders: the run; the predictions of further folders are compared with its own.
      port: TCP port; 0 = any free port.

    Raises:
      UserError: a folder does not exist, or the port is not available.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"{missing[0]} is not a folder: start the run first, or correct the path")
    listen(functools.partial(application, folders), "the report", HOST, port)


def application(folders: Sequence[pathlib.Path]) -> Starlette:
    """Returns the ASGI application of the report, see `serve_report`."""
    pages = Pages(folders)

    async def report(request: Request) -> HTMLResponse:
        return HTMLResponse(await asyncio.to_thread(pages.report), headers=HEADERS)

    async def explorer(request: Request) -> HTMLResponse:
        try:
            return HTMLResponse(await asyncio.to_thread(pages.explorer), headers=HEADERS)
        except UserError as error:
            raise HTTPException(404, str(error)) from error

    async def version(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await asyncio.to_thread(pages.version), headers=HEADERS)

    routes = [Route("/", report), Route("/explorer", explorer), Route("/version", version)]
    return make_application(routes, lambda: True, {}, Guard(Access(), HOST))


class Pages:
    """The pages of a run, rendered again when its files have changed."""

    def __init__(self, folders: Sequence[pathlib.Path]) -> None:
        self._folders, self._run = folders, folders[0]
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[str, bytes]] = {}

    def version(self) -> str:
        """A text that changes when a file of the report does."""
        files = (self._run / name for name in (METRICS, TREES, SUMMARY, CONFIG))
        return _version(files, str(has_pages(self._run)))

    def report(self) -> bytes:
        """The report; until it can be rendered, a page with the reason."""
        version = self.version()
        return self._cached("report", version, lambda: self._render(version))

    def explorer(self) -> bytes:
        """The explorer of all predictions so far; raises `UserError` if there are none."""
        version = _version(self._prediction_files())
        return self._cached("explorer", version, lambda: explorer_page(self._folders))

    def _render(self, version: str) -> str:
        run, message = RunData((), (), {}), ""
        try:
            run = load_run(self._run)
        except UserError as error:
            # A run that has just begun has no metrics yet.
            message = f"Nothing to show yet: {error}"
        return render(run, Live(version, message, has_pages(self._run)))

    def _prediction_files(self) -> Iterator[pathlib.Path]:
        for folder in self._folders:
            yield from (folder / TREES, *sorted(folder.rglob(f"{FOLDER}/*.jsonl")))

    def _cached(self, name: str, version: str, make: Callable[[], str]) -> bytes:
        # One at a time: several tabs ask at the same moment, when a file has changed.
        with self._lock:
            if self._pages.get(name, ("",))[0] != version:
                # Texts of documents and models may hold lone surrogates, which UTF-8 lacks.
                self._pages[name] = (version, make().encode("utf-8", "replace"))
            return self._pages[name][1]


def _version(files: Iterable[pathlib.Path], more: str = "") -> str:
    """A digest of names, sizes and times of files."""
    digest = hashlib.blake2s(more.encode())
    for file in files:
        if file.is_file():
            state = file.stat()
            digest.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
