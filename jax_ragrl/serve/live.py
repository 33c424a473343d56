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
from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from jax_ragrl.errors import UserError
from jax_ragrl.report.build import Live, render
from jax_ragrl.report.explorer import explorer_page, has_pages
from jax_ragrl.report.load import CONFIG, METRICS, SUMMARY, TREES, RunData, load_run
from jax_ragrl.run.predictions import FOLDER
from jax_ragrl.serve.access import SETTINGS
from jax_ragrl.serve.http import listen, make_application

Endpoint = Callable[[Request], Awaitable[HTMLResponse]]
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the pages have their own policies
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve_report(folders: Sequence[pathlib.Path], port: int) -> None:
    """Serves the report of the first folder, a run, until SIGTERM or SIGINT; port 0 = any free one.

    The predictions of further folders are compared with its own.

    Raises:
      UserError: a folder does not exist, or the port is not available.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"{missing[0]} is not a folder: start the run first, or correct the path")
    # Reports show texts of corpora: the address is that of this machine, others need a tunnel.
    settings = SETTINGS._replace(port=port)
    listen(functools.partial(application, folders), "the report", settings)


def application(folders: Sequence[pathlib.Path]) -> Starlette:
    """Returns the ASGI application of the report, see `serve_report`."""
    run, lock = folders[0], threading.Lock()

    def version() -> str:
        files = [run / name for name in (METRICS, TREES, SUMMARY, CONFIG)]
        return _version(files, str(has_pages(run)))

    def explorer_version() -> str:
        files = [folder / TREES for folder in folders]
        return _version(files + [x for f in folders for x in sorted(f.rglob(f"{FOLDER}/*.jsonl"))])

    @functools.lru_cache(1)
    def report(version: str) -> str:
        data, message = RunData((), (), {}), ""
        try:
            data = load_run(run)
        except UserError as error:  # a run that has just begun has no metrics yet
            message = f"Nothing to show yet: {error}"
        return render(data, Live(version, message, has_pages(run)))

    @functools.lru_cache(1)
    def explorer(version: str) -> str:
        return explorer_page(folders)

    def endpoint(version: Callable[[], str], make: Callable[[str], str]) -> Endpoint:
        def page() -> bytes:
            # One at a time: several tabs ask at the same moment, when a file has changed.
            with lock:
                # Texts of documents and models may hold lone surrogates, which UTF-8 lacks.
                return make(version()).encode("utf-8", "replace")

        async def reply(request: Request) -> HTMLResponse:
            try:
                return HTMLResponse(await asyncio.to_thread(page), headers=HEADERS)
            except UserError as error:
                raise HTTPException(404, str(error)) from error

        return reply

    routes = [
        Route("/", endpoint(version, report)),
        Route("/version", endpoint(version, str)),
        Route("/explorer", endpoint(explorer_version, explorer)),
    ]
    return make_application(routes, {})


def _version(files: Iterable[pathlib.Path], more: str = "") -> str:
    """A digest of names, sizes and times of files."""
    states = [(str(x), (s := x.stat()).st_size, s.st_mtime_ns) for x in files if x.is_file()]
    return hashlib.blake2s(f"{states}{more}".encode()).hexdigest()[:16]
