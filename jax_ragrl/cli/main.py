"""Entry point of the `ragrl` command: parser, dispatch and error messages.

An error that a user can correct is one line on stderr and exit code 2. The module of each group of
commands imports JAX inside the command's function, so that `--help` and a typing error stay fast.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import faulthandler
import io
import os
import pathlib
import re
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax_ragrl.cli import config, data, evaluate, inference, measure, search, train, warmstart
from jax_ragrl.cli.common import CONFIGS, AddCommand, Command, HelpFormatter
from jax_ragrl.config.arguments import CONFIG_HELP
from jax_ragrl.errors import EffectError, Preempted, UserError, safe_line
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.progress import heartbeat
from jax_ragrl.runtime.stopping import CODE, Terminated, ends_on_sigterm
from jax_ragrl.version import __version__

__all__ = ["CONFIGS", "load_config", "main"]

# All commands, in the order in which a user needs them.
TITLES: Sequence[tuple[str, Sequence[Callable[[AddCommand], None]]]] = (
    ("start here", (train.add_quickstart,)),
    ("your data", (data.add_data, search.add_search)),
    ("checks", (config.add_config,)),
    ("a policy", (warmstart.add_warmup, train.add_train)),
    ("its answers", (evaluate.add_report, evaluate.add_evaluate, inference.add_ask)),
    ("its use", (inference.add_serve, search.add_serve_retriever, inference.add_export)),
    ("research", (train.add_experiment, data.add_replies, measure.add_bench)),
)
# Commands that only hold others; `serve` holds one and is a command itself.
HOLDERS = {
    "data": "generate, divide, index and search passages and questions",
    "config": "print a config, check all that it names, or compute the memory that it needs",
    "warmup": "prepare a policy for reinforcement learning: demonstrations and supervised training",
    "experiment": "compare arms, systems and seeds; decide claims of the papers",
    "bench": "measure training, sampling, search or a whole step",
}
DESCRIPTION = (
    "Train multi-agent retrieval-augmented generation systems with reinforcement learning."
)
EPILOG = "\n'ragrl COMMAND --help' lists the options of a command."
PACKAGE = pathlib.Path(__file__).parents[1]
# Saved, because `main` replaces it.
DEFAULT_HOOK = sys.unraisablehook
FULL = "the disk is full ({}): free some space and run the same command again"
LIMITED = "a file may not become larger ({}): raise the limit (ulimit -f) and run again"
# Messages of the operating system, which TensorStore repeats in its own errors.
DISK_ERRORS = {
    "No space left on device": FULL,
    "Disk quota exceeded": FULL,
    "File too large": LIMITED,
}
MEMORY = (
    "out of memory ({}): free some, or need less: fewer tokens and rows at a time ('ragrl config "
    "plan' says what a config needs, docs/howto/memory.md what lowers it), a smaller model or index"
)
THREADS = (
    "the system starts no further thread ({}): end other programs, or raise the limit of processes "
    "(ulimit -u) or of memory (ulimit -v)"
)
DEVICES = (
    "JAX finds no device ({}): install its package (the extras cuda, cuda12 and tpu) and check the "
    "driver (nvidia-smi), or unset JAX_PLATFORMS"
)
TEMPORARY = "temporary files have no place ({}): free some space there, or set TMPDIR to a folder"
# Parts of messages, in lower case, of JAX, NumPy, the system and its loader of libraries.
LACKING = {
    "can't start new thread": THREADS,
    "resource temporarily unavailable": THREADS,
    "resource_exhausted": MEMORY,
    "out of memory": MEMORY,
    "cannot allocate memory": MEMORY,
    "failed to map segment": MEMORY,
    "unable to initialize backend": DEVICES,
    "no usable temporary directory": TEMPORARY,
}
CLOSED_LOOP = "Event loop is closed"  # the error of asyncio
CONFIG_OPTION = re.compile(r"--config(\.[^=]+)?")  # without a value


def main(argv: Sequence[str] | None = None) -> int:
    """Executes a command and returns the exit code.

    0; 2 after an error of the user; 130 after Ctrl-C; 141 if the reader of the output has left;
    143 after SIGTERM.
    """
    warnings.formatwarning = _format_warning
    sys.unraisablehook = _report_unraisable
    if hasattr(signal, "SIGUSR1") and sys.__stderr__:
        # `kill -USR1 PID` prints the stack of a process that hangs.
        faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A name or a text that the terminal's encoding lacks ends no command after its work.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = _parse(sys.argv[1:] if argv is None else argv)
        with ends_on_sigterm(), heartbeat(options.name or "ragrl"):
            options.run(options)
        sys.stdout.flush()  # here, because at the exit of Python a failure is a traceback
    except (UserError, EffectError) as error:
        return _report_error(str(error))
    except Preempted as notice:
        return _report_error(str(notice), CODE)
    except Terminated:  # its line is printed
        return CODE
    except KeyboardInterrupt:
        return _report_error("interrupted: the same command continues from what is saved", 130)
    except BrokenPipeError:  # as of `ragrl config show | head`
        # Python flushes again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    # TensorStore raises ValueError when the disk is full; errors of JAX are of RuntimeError.
    except (
        OSError,
        ValueError,
        MemoryError,
        RuntimeError,
        ImportError,
        AssertionError,
    ) as error:
        if not (message := _resource_message(error)):
            raise
        return _report_error(message)
    return 0


def _report_error(message: str, code: int = 2) -> int:
    print(f"ragrl: {safe_line(message)}", file=sys.stderr)
    return code


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Formats a warning like an error of a user: one line, without a position in the code."""
    # A warning of another library has its name, so that a reader knows whom to ask.
    place = pathlib.Path(filename)
    is_own = category is UserWarning or PACKAGE in place.parents
    origin = "" if is_own else f" ({category.__name__}, {place.parent.name}/{place.name})"
    return f"ragrl: warning: {safe_line(str(message))}{origin}\n"


def _report_unraisable(event: sys.UnraisableHookArgs) -> None:
    """Reports an exception that no caller can catch, except the echoes of a failed checkpoint.

    The first error of an array becomes the message of the command; those of the others follow in
    other threads. `Terminated` may be raised in a callback, which drops it: then the process ends a
    little later.
    """
    is_echo = isinstance(event.exc_value, RuntimeError) and str(event.exc_value) == CLOSED_LOOP
    is_end = isinstance(event.exc_value, Terminated)
    if not (is_echo or is_end or asyncio.iscoroutine(event.object)):
        DEFAULT_HOOK(event)


def _resource_message(error: Exception) -> str:
    """The message for a lack of disk, memory, threads or devices, or a bad file; else empty."""
    text = " ".join(str(error).split())
    for part, message in DISK_ERRORS.items():
        if part in text:
            return message.format(text)
    for part, message in LACKING.items():
        if part in text.lower():
            return message.format(text[:200])
    # JAX asserts without a message that a platform has a device, and removes its own frames.
    if isinstance(error, AssertionError) and "jax" in sys.modules:
        try:
            sys.modules["jax"].devices()
        except AssertionError:
            return DEVICES.format(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}")
    if isinstance(error, MemoryError):
        return MEMORY.format(text[:200] or "of this machine")
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}: give a path that can be read or written"
    return ""


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; config options remain, unparsed, in the list `config`."""
    arguments = _join_config_values(argv)
    # argparse takes an option with a blank, such as --config.mesh="(1, 2)", for a positional one.
    config = [text for text in arguments if re.match(r"--config([=.]|$)", text)]
    parser, names = _parser()
    # argparse would reject an unknown command with a list of all commands and no suggestion.
    for holder, word in zip(("", *argv), argv[:2], strict=False):
        choices = names.get(holder, ())
        if choices and not word.startswith("-") and word not in choices:
            # Such as `ragrl plan`: a word that is a command of a group.
            groups = [f"'ragrl {group} {word}'" for group in names if word in names[group]]
            if groups:
                raise UserError(f"unknown command {word!r}: run {' or '.join(groups)}")
            matches = difflib.get_close_matches(word, choices, n=1)
            hint = f"did you mean {matches[0]!r}? " if matches else ""
            command = f"ragrl {holder}".strip()
            raise UserError(f"unknown command {word!r}: {hint}run {command!r} to list the commands")
    # The options of a config depend on its file, so `load_config` parses them later.
    options, rest = parser.parse_known_args([text for text in arguments if text not in config])
    if unknown := rest + ([] if options.takes_config else config):
        # Without their values, which argparse cannot tell from positional arguments.
        unknown = [x for x in unknown if x.startswith("-")] or unknown
        command = f"ragrl {options.name}".strip()
        raise UserError(
            f"'{command}' does not take {' '.join(unknown)!r}: '{command} --help' lists its "
            "arguments"
        )
    options.config = config
    return options


def _join_config_values(argv: Sequence[str]) -> list[str]:
    """Joins `--config FILE` and `--config.key VALUE` with `=`: argparse does not know them."""
    arguments: list[str] = []
    for argument in argv:
        if arguments and CONFIG_OPTION.fullmatch(arguments[-1]) and not argument.startswith("--"):
            arguments[-1] += f"={argument}"
        else:
            arguments.append(argument)
    return arguments


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, Collection[str]]]:
    """The parser, and the names of commands by the command that holds them; "" is `ragrl`."""
    parser = argparse.ArgumentParser(
        prog="ragrl",
        usage="ragrl [--help] [--version] COMMAND [OPTIONS]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ragrl {__version__}")
    parser.set_defaults(run=lambda options: parser.print_help(), takes_config=False, name="")
    # The epilog lists the commands, because argparse cannot list them by title. `prog` shortens
    # the usage of each command, which would begin with the usage above otherwise.
    held = {"": parser.add_subparsers(prog="ragrl", help=argparse.SUPPRESS)}
    parsers: dict[str, argparse.ArgumentParser] = {}
    lines: list[str] = []

    def add_parser(name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
        holder, _, word = name.rpartition(" ")
        if not holder:
            lines.append(f"  {word:10}  {summary}")
        parsers[name] = held[holder].add_parser(
            word,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            # An abbreviation may become ambiguous when an option is added.
            allow_abbrev=False,
            **options,
        )
        return parsers[name]

    def add_command(
        name: str, run: Command, summary: str, *, takes_config: bool = False
    ) -> argparse.ArgumentParser:
        holder = name.rpartition(" ")[0]
        if holder not in held:
            if holder in HOLDERS:
                outer = add_parser(holder, HOLDERS[holder])
                helps = {"run": lambda options: outer.print_help(), "takes_config": False}
                outer.set_defaults(**helps, name=holder)
            metavar = "COMMAND" if holder in HOLDERS else "[COMMAND]"
            held[holder] = parsers[holder].add_subparsers(
                prog=f"ragrl {holder}", title="commands", metavar=metavar
            )
        epilog = CONFIG_HELP if takes_config else None
        sub = add_parser(name, summary, epilog=epilog, formatter_class=HelpFormatter)
        sub.set_defaults(run=run, takes_config=takes_config, name=name)
        return sub

    for title, functions in TITLES:
        lines.append(f"\n{title}:")
        for add in functions:
            add(add_command)
    parser.epilog = "\n".join([*lines, EPILOG]).strip()
    return parser, {holder: subparsers.choices for holder, subparsers in held.items()}


if __name__ == "__main__":
    sys.exit(main())
