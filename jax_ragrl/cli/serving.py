"""Options of the commands that serve over HTTP: `serve` and `serve retriever`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jax_ragrl.config.arguments import positive
from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError

if TYPE_CHECKING:
    from jax_ragrl.serve.http import Settings

DEADLINES = (
    ("head", 10.0, "the headers of a request"),
    ("body", 30.0, "the body of a request"),
    ("reply", 60.0, "a client to receive its reply"),
    ("drain", 20.0, "requests in progress after SIGTERM"),
)


def add_serving_options(sub: argparse.ArgumentParser, deadline: float) -> None:
    """Adds the options that `serving_settings` reads; `deadline` is that of a request, in s."""
    sub.add_argument("--host", default="127.0.0.1", help="bind address; 0.0.0.0 = all interfaces")
    sub.add_argument("--port", type=int, default=8000, help="TCP port; 0 = any free port")
    text = "seconds after which a request gets 503"
    sub.add_argument("--deadline", type=float, default=deadline, help=text)
    _add_access_options(sub)
    for name, seconds, subject in DEADLINES:
        text = f"seconds for {subject}"
        sub.add_argument(f"--{name}-deadline", type=float, default=seconds, help=text)
    text = "max connections; beyond it, an old one without a complete request is cut"
    sub.add_argument("--connections", type=positive, default=512, help=text)
    text = "max MiB of all request bodies together"
    sub.add_argument("--body-memory", type=positive, default=64, metavar="MIB", help=text)
    text = "file of one JSON object per request; - = standard output"
    sub.add_argument("--access-log", default="", metavar="FILE", help=text)
    text = "write questions and queries to --access-log too"
    sub.add_argument("--log-texts", action="store_true", help=text)


def _add_access_options(sub: argparse.ArgumentParser) -> None:
    text = "file of API keys, one per line, of which requests present one (or set RAGRL_API_KEY)"
    key = sub.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=local, metavar="FILE", help=text)
    text = "let every client ask, also clients of other machines"
    key.add_argument("--no-api-key", action="store_true", help=text)
    text = "further name by which clients call this machine; * = any (may be repeated)"
    sub.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=text)
    text = "max requests in progress per address before returning 429"
    sub.add_argument("--per-client", type=positive, default=64, help=text)


def serving_settings(options: argparse.Namespace) -> Settings:
    """The settings of a server.

    Raises:
      UserError: a value allows no request, or other machines could ask without a key.
    """
    from jax_ragrl.serve.connections import Deadlines
    from jax_ragrl.serve.guard import Access, read_keys
    from jax_ragrl.serve.http import Settings, check_seconds, check_settings

    if options.log_texts and not options.access_log:
        raise UserError("--log-texts is for the access log: give --access-log FILE too")
    access = Access(
        keys=() if options.no_api_key else tuple(read_keys(options.api_key_file)),
        is_open=options.no_api_key,
        hosts=tuple(options.allow_host),
        per_client=options.per_client,
    )
    seconds = {name: getattr(options, f"{name}_deadline") for name, *_ in DEADLINES}
    settings = Settings(
        access=access,
        deadlines=Deadlines(**seconds),
        connections=options.connections,
        body_bytes=options.body_memory << 20,
        access_log=options.access_log,
        log_texts=options.log_texts,
    )
    # Before a model is loaded: a wrong option fails at once.
    check_settings(settings, options.host)
    check_seconds(options.deadline)
    return settings
