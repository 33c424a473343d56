"""Options of the commands that serve over HTTP: `serve` and `serve retriever`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jax_ragrl.config.arguments import positive
from jax_ragrl.config.schema import local

if TYPE_CHECKING:
    from jax_ragrl.serve.access import Settings
    from jax_ragrl.serve.http import Limits


def add_serving_options(sub: argparse.ArgumentParser, deadline: float) -> None:
    """Adds the options that `serving_settings` reads; `deadline` is that of a request, in s."""
    sub.add_argument("--host", default="127.0.0.1", help="bind address; 0.0.0.0 = all interfaces")
    sub.add_argument("--port", type=int, default=8000, help="TCP port; 0 = any free port")
    text = "seconds after which a request gets 503"
    sub.add_argument("--deadline", type=float, default=deadline, help=text)
    text = "file of API keys, one per line, of which requests present one (or set RAGRL_API_KEY)"
    key = sub.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=local, metavar="FILE", help=text)
    text = "let every client ask, also clients of other machines"
    key.add_argument("--no-api-key", action="store_true", help=text)
    text = "further name by which clients call this machine; * = any (may be repeated)"
    sub.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=text)
    text = "max connections; further ones get 503"
    sub.add_argument("--connections", type=positive, default=512, help=text)
    text = "tools for agents by MCP: http = also at /mcp, stdio = on the standard streams alone"
    sub.add_argument("--mcp", nargs="?", const="http", choices=("http", "stdio"), help=text)
    text = "seconds for requests in progress after SIGTERM"
    sub.add_argument("--drain-deadline", type=positive, default=20, help=text)


def serving_settings(options: argparse.Namespace) -> tuple[Limits, Settings]:
    """The limits and settings of a server; `UserError` if others could ask without a key."""
    from jax_ragrl.serve.access import Settings, check_access, read_keys
    from jax_ragrl.serve.http import Limits, check_limits
    from jax_ragrl.serve.mcp import check_package

    if options.mcp:
        check_package()

    limits = Limits(options.batch, options.waiting, options.deadline)
    settings = Settings(
        host=options.host,
        port=options.port,
        keys=() if options.no_api_key else tuple(read_keys(options.api_key_file)),
        is_open=options.no_api_key,
        hosts=tuple(options.allow_host),
        connections=options.connections,
        drain=options.drain_deadline,
        mcp=options.mcp or "",
    )
    # Before a model is loaded: a wrong option fails at once.
    check_limits(limits)
    check_access(settings)
    return limits, settings
