"""Files of a finished run are damaged; its commands mend the damage, or name file and remedy."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping

from tests.chaos.runs import Outcome, Variant, call, digest, train_command

QUESTION = "Who is the mayor of the birthplace of Ann Bell?"
Change = Callable[[pathlib.Path], object]


def cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: pathlib.Path) -> None:
    """Flips one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def empty(file: pathlib.Path) -> None:
    file.write_bytes(b"")


def remove(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def zero(file: pathlib.Path) -> None:
    """Overwrites a file with NUL bytes, as a journal does after a loss of power."""
    file.write_bytes(bytes(file.stat().st_size))


def appending(tail: bytes) -> Change:
    def append(file: pathlib.Path) -> None:
        file.write_bytes(file.read_bytes() + tail)

    return append


def writing(text: str) -> Change:
    return lambda file: file.write_text(text)


def replace_by_folder(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def make_folder(folder: pathlib.Path) -> None:
    folder.mkdir()


def damage_again(folder: pathlib.Path) -> None:
    """Makes the folder of an earlier damaged checkpoint, and damages the checkpoint once more."""
    newest = folder.parent / "4"
    shutil.copytree(newest, folder)
    flip(largest(newest / "state"))


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max(
        (x for x in folder.glob("**/d/*") if x.is_file()), key=lambda file: file.stat().st_size
    )


@dataclasses.dataclass(frozen=True)
class Damage:
    """A change of one file of a run.

    Fields:
      path: the file or folder below the run; `largest:FOLDER` is the largest data file in FOLDER.
      change: what happens to the file.
    """

    path: str
    change: Change

    def apply(self, workdir: pathlib.Path) -> None:
        folder = self.path.removeprefix("largest:")
        self.change(largest(workdir / folder) if folder != self.path else workdir / folder)


JSON_FILES = {"cut": cut, "empty": empty, "missing": remove, "a list": writing("[]\n")}
DATA_FILES = {"cut": cut, "bit flipped": flip, "empty": empty, "missing": remove, "zeros": zero}
TAILS = {
    "binary tail": appending(b"\x80\xff\xfe{\x00"),
    "number": appending(b"3\n"),
    "zeros": appending(bytes(4096)),
    "half a line": cut,
    "a folder": replace_by_folder,
    "missing": remove,
    "empty": empty,
}
NEWEST, BEST = "checkpoints/4", "best/4"
KINDS: Mapping[str, Mapping[str, Change]] = {
    f"largest:{NEWEST}/state": DATA_FILES,
    f"{NEWEST}/state/manifest.ocdbt": DATA_FILES,
    f"{NEWEST}/state/_METADATA": JSON_FILES,
    f"{NEWEST}/state/_sharding": {"empty": empty, "missing": remove},
    f"{NEWEST}/meta/metadata": {**JSON_FILES, "bit flipped": flip},
    f"{NEWEST}/_CHECKPOINT_METADATA": {"empty": empty, "missing": remove},
    f"{NEWEST}/state": {"missing": remove},
    NEWEST: {"missing": remove, "a file": replace_by_file},
    "checkpoints/5": {"an empty folder": make_folder, "a file": writing("")},
    "checkpoints/damaged-4": {"after a bit flipped": damage_again},
    "checkpoints": {"missing": remove},
    "metrics.jsonl": TAILS,
    "trees.jsonl": TAILS,
    "config.json": {**JSON_FILES, "bit flipped": flip, "a folder": replace_by_folder},
    "corpus.json": {**JSON_FILES, "a number": writing("3\n"), "numbers": writing("[1]\n")},
    "questions.json": {**JSON_FILES, "a number": writing("3\n"), "numbers": writing("[1]\n")},
    ".lock": {"binary": appending(b"\xff\xfe"), "missing": remove, "a folder": replace_by_folder},
    "index/index.json": {**JSON_FILES, "bit flipped": flip, "an object": writing("{}\n")},
    "index/vectors/zarr.json": JSON_FILES,
    "index/vectors/shards.json": JSON_FILES,
    "index/vectors/c/0/0": DATA_FILES,
    "index/encoder/hashed.npz": DATA_FILES,
    "index": {"missing": remove},
    "largest:BEST/state": DATA_FILES,
    "BEST/meta/metadata": JSON_FILES,
    "predictions/dev-4.jsonl": TAILS,
    "tensorboard": {"missing": remove},
}


def damages(workdir: pathlib.Path) -> dict[str, Damage]:
    """Returns all damages to a run by name; `workdir` shows which step is the best."""
    best = sorted(x.name for x in (workdir / "best").iterdir() if x.name.isdigit())[-1]
    pairs = [(path.replace("BEST", f"best/{best}"), kinds) for path, kinds in KINDS.items()]
    return {
        f"{path}: {kind}": Damage(path, change)
        for path, kinds in pairs
        for kind, change in kinds.items()
    }


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a command on a damaged run: `mended`, `named`, or the fault."""

    damage: str
    command: str
    verdict: str
    message: str = ""

    @property
    def is_good(self) -> bool:
        return self.verdict in ("mended", "named")


# The commands other than `ragrl train` that read a file, by the start of its path.
READERS = {
    "checkpoints": ("ask",),
    f"largest:{NEWEST}": ("ask",),
    "best": ("ask best",),
    "largest:best": ("ask best",),
    "index": ("ask",),
    "config": ("ask", "report"),
    "metrics": ("report",),
    "trees": ("report",),
    "predictions": ("report",),
}


def commands(workdir: pathlib.Path) -> dict[str, list[str]]:
    """Returns the commands other than `ragrl train` that read a run."""
    return {
        "ask": ["ask", QUESTION, f"--workdir={workdir}"],
        "ask best": ["ask", QUESTION, f"--workdir={workdir}@best"],
        "report": ["report", str(workdir)],
    }


def readers(path: str) -> list[str]:
    """Returns the names of all commands that read a file."""
    return ["train", *(x for start, own in READERS.items() if path.startswith(start) for x in own)]


def verdict(outcome: Outcome, is_equal: Callable[[], bool]) -> str:
    """Judges the end of a command on a damaged run.

    Args:
      outcome: how the command ended.
      is_equal: whether the command, which succeeded, has the result of an undamaged run.
    """
    if outcome.is_late or outcome.has_traceback:
        return "hangs" if outcome.is_late else "traceback"
    if outcome.is_success and is_equal():
        return "mended"
    if outcome.codes not in ((0,), (2,)):
        return f"exit code {outcome.codes}"
    # A command that succeeds with another result must say why: it has read an older checkpoint.
    return "named" if outcome.messages() else "another result, silently"


def hurt(
    variant: Variant,
    folder: pathlib.Path,
    names: Iterable[str] | None = None,
    *,
    train_only: bool = False,
    note: Callable[..., None] = lambda *_: None,
) -> list[Result]:
    """Trains a run, and gives each damaged copy to `ragrl train` and the commands that read runs.

    Args:
      variant: the kind of run.
      folder: for the run and its copies.
      names: the damages; None: all.
      train_only: leave the other commands out.
      note: receives each result, for progress.
    """
    whole, copy = folder / "whole", folder / "copy"
    outcome = call(train_command(variant, whole), whole)
    assert outcome.is_success, outcome.output
    expected, every = _results(whole, train_only=train_only), damages(whole)
    results: list[Result] = []
    for name in every if names is None else names:
        for command in readers(every[name].path)[: 1 if train_only else None]:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            every[name].apply(copy)
            results.append(_judged(variant, copy, name, command, expected))
            note("damages", *dataclasses.astuple(results[-1]))
    return results


def _judged(
    variant: Variant, copy: pathlib.Path, name: str, command: str, expected: Mapping[str, str]
) -> Result:
    if command == "train":
        outcome = call(train_command(variant, copy), copy)
        end = verdict(outcome, lambda: digest(copy) == expected[command])
    else:
        outcome = call(commands(copy)[command], copy)
        end = verdict(outcome, lambda: _answer(outcome) == expected[command])
    lines = outcome.messages() or outcome.output.splitlines()[-1:]
    return Result(name, command, end, " | ".join(lines)[:600])


def _results(whole: pathlib.Path, *, train_only: bool) -> dict[str, str]:
    """Returns the result of each command on a run that is not damaged."""
    own = {} if train_only else commands(whole)
    answers = {name: call(command, whole) for name, command in own.items()}
    assert all(outcome.is_success for outcome in answers.values()), answers
    return {"train": digest(whole), **{name: _answer(x) for name, x in answers.items()}}


def _answer(outcome: Outcome) -> str:
    """Returns the lines of an answer; a report is a file, of which the command prints the name."""
    lines = [x for x in outcome.output.splitlines() if not x.startswith(("ragrl: ", "compiled"))]
    return "" if any("report.html" in line for line in lines) else "\n".join(lines)
