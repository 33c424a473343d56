"""A server of raw bytes on a local socket: replies that no web framework would send."""

import contextlib
import itertools
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator

Pieces = Callable[[int], Iterable[bytes | float]]
Answer = Callable[[int, bytes], Iterable[bytes | float]]


def whole(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A complete HTTP reply."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def sending(pieces: Pieces) -> contextlib.AbstractContextManager[tuple[str, list[float]]]:
    """The address of a server, and the times of its requests.

    `pieces` maps the number of a request, from 0, to the bytes of its reply; a number pauses.
    """
    return answering(lambda number, _: pieces(number))


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, list[float]]]:
    """Like `sending`, for replies that depend on the body of the request, too."""
    times: list[float] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError, LookupError):  # the client may have gone
                # A client that leaves ends the lines, too: without that this loop would spin.
                lines = itertools.takewhile(lambda x: x.strip(), iter(self.rfile.readline, None))
                headers = b"".join(lines).lower()
                body = self.rfile.read(int(headers.partition(b"content-length:")[2].split()[0]))
                times.append(time.monotonic())
                for piece in answer(len(times) - 1, body):
                    if isinstance(piece, bytes):
                        self.wfile.write(piece)
                        self.wfile.flush()
                    else:
                        time.sleep(piece)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, request_queue_size = True, 128

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", times
    finally:
        server.shutdown()
        server.server_close()
