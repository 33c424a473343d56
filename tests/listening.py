"""Serves an application on a local socket, in a thread."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def running(server: uvicorn.Server) -> Iterator[int]:
    """Yields the port of a server that runs in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def listening(application: Any) -> Iterator[str]:
    """Yields the address of an application while it is served."""
    config = uvicorn.Config(application, log_level="warning", log_config=None, lifespan="on")
    with running(uvicorn.Server(config)) as port:
        yield f"http://127.0.0.1:{port}"
