"""The command line: a user error is one line and exit code 2; options, help, dispatch, locks."""

import argparse
import errno
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import warnings
from unittest.mock import Mock

import jax
import pytest

from jax_ragrl.cli import data, inference
from jax_ragrl.cli.main import HOLDERS, TITLES, _parser, load_config, main
from jax_ragrl.config.shipped_configs import config_path
from jax_ragrl.config.snapshot import load_saved_config, save_config
from jax_ragrl.errors import UserError
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.training import loop
from tests.jobs import config_job
from tests.tiny import saved_policy

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny" / "c3po.py"


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ragrl: ") and "\n" not in line
    return line


def test_a_reader_that_leaves_ends_a_command_without_a_message():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jax_ragrl", "config", "show"]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


@pytest.mark.slow
def test_a_workdir_belongs_to_one_config(tmp_path, capsys):
    policy = saved_policy(tmp_path)
    args = ("train", f"--config={CONFIG}", f"--workdir={tmp_path}", "--config.run.steps=0")
    # The next call corrects it.
    assert "nowhere" in error_line(capsys, *args, "--config.policy=nowhere")
    assert main([*args, f"--config.policy={policy}"]) == 0
    capsys.readouterr()
    (tmp_path / "checkpoints" / "1").mkdir()
    line = error_line(capsys, *args, f"--config.policy={policy}", "--config.seed=5")
    assert "seed" in line and str(tmp_path) in line
    ask = ("ask", "Who?", f"--workdir={tmp_path}")
    assert "--config=FILE" in error_line(capsys, *ask, f"--config={CONFIG}")
    assert "elsewhere" in error_line(capsys, *ask, "--config.policy=elsewhere")


def test_a_constant_learning_rate_permits_a_longer_run(tmp_path):
    (tmp_path / "baselines.json").touch()  # there are results
    for schedule in ("constant", "cosine"):
        args = (f"--config={CONFIG}", f"--config.optimizer.schedule={schedule}")
        (tmp_path / "config.json").unlink(missing_ok=True)
        claim_workdir(load_config(None, [*args, "--config.run.steps=3"]), tmp_path)
        longer = load_config(None, [*args, "--config.run.steps=9"])
        if schedule == "constant":
            assert claim_workdir(longer, tmp_path).run.steps == 9
            (tmp_path / "checkpoints" / "7").mkdir(parents=True)
            for steps in (7, 6):  # it has taken 7
                fewer = load_config(None, [*args, f"--config.run.steps={steps}"])
                if steps == 7:
                    claim_workdir(fewer, tmp_path)
            with pytest.raises(UserError, match=r"config\.run\.steps differs"):
                claim_workdir(fewer, tmp_path)
    with pytest.raises(UserError, match=r"config\.run\.steps differs"):
        claim_workdir(longer, tmp_path)


def test_a_run_resumes_with_another_server_address(tmp_path):
    file, here = tmp_path / "config.json", {"kind": "openai", "base_url": "http://a/v1"}
    there = here | {"base_url": "http://b/v1"}
    save_config(file, {"llm": here, "judge": here, "seed": 0})
    save_config(file, {"llm": there, "judge": there, "seed": 0})
    assert load_saved_config(file)["llm"] == load_saved_config(file)["judge"] == there
    with pytest.raises(UserError, match="config.seed differs"):
        save_config(file, {"llm": there, "judge": there, "seed": 1})


def test_replies_to_users_are_not_stored():
    fields = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    servers = [f"--config.{x}.{k}={v}" for x in ("llm", "judge") for k, v in fields.items()]
    config = [f"--config={CONFIG}", "--config.data.world.size=40", *servers]
    options = argparse.Namespace(workdir=None, config=config)
    with inference._open_system(options) as (_, job, parts):
        assert not job.llm.cache and not job.judge.cache
        assert parts.llm._cache is None and parts.judge._cache is None


@pytest.mark.parametrize("key", ["--config.seed", "--config.data.world.seed"])
@pytest.mark.parametrize("kind", [[], ["--real"]], ids=["tiny", "real"])
def test_a_seed_that_quickstart_would_replace_is_refused(kind, key, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax_ragrl.runtime.multihost.join", lambda: pytest.fail("started"))
    line = error_line(capsys, "quickstart", *kind, f"--workdir={tmp_path}", f"{key}=7")
    assert f"{key} is not for quickstart" in line and line.endswith("give --seed")


def test_an_empty_path_is_no_folder_and_one_without_write_access_is_named(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "empty" in error_line(capsys, "data", "world", "--out", "")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    assert str(file) in error_line(capsys, "data", "world", "--out", str(file / "below"))


def test_only_a_full_disk_or_a_limit_on_files_is_a_user_error(monkeypatch, capsys):
    monkeypatch.setattr(data, "run_world", run := Mock())
    run.side_effect = ValueError("RESOURCE_EXHAUSTED: cannot write /x: No space left on device")
    assert "disk is full" in error_line(capsys, "data", "world", "--out", "w")
    run.side_effect = ValueError("Error writing /x [OS error 27: EFBIG File too large]")
    assert "ulimit -f" in error_line(capsys, "data", "world", "--out", "w")
    bug = jax.errors.JaxRuntimeError("INTERNAL: a bug")
    for error in (ValueError("bad"), TimeoutError("late"), bug):
        run.side_effect = error
        with pytest.raises(type(error)):
            main(["data", "world", "--out", "w"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory (of this machine)"),
        (MemoryError("Unable to allocate 9 TiB"), "out of memory (Unable to allocate 9 TiB)"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED:\n B"), "memory (RESOURCE_EXHAUSTED: B)"),
        (jax.errors.JaxRuntimeError("INTERNAL: x: Out of memory"), "out of memory (INTERNAL"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "out of memory ([Errno 12]"),
        (ImportError("libx.so: failed to map segment from shared object"), "out of memory (libx"),
        (RuntimeError("can't start new thread"), "no further thread (can't start new thread)"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "no further thread"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/t']"), "found in ['/t']"),
    ],
    ids=str,
)
def test_a_lack_of_memory_threads_or_a_place_is_one_line_with_a_remedy(
    monkeypatch, capsys, error, message
):
    monkeypatch.setattr(data, "run_world", Mock(side_effect=error))
    line = error_line(capsys, "data", "world", "--out", "w")
    assert message in line and re.search(r"ragrl config plan|ulimit -u|TMPDIR", line)


def test_a_platform_without_a_device_is_one_line_with_a_remedy():
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "jax_ragrl", "bench", "sample"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cuda" in done.stderr and "the extras cuda, cuda12 and tpu" in done.stderr


def test_an_index_may_be_in_a_parent_folder(tmp_path, monkeypatch):
    (tmp_path / "c.jsonl").write_text('{"id": "1", "title": "a", "text": "b"}')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert main("data index --corpus ../c.jsonl --out ../i --kind exact".split()) == 0


@pytest.mark.parametrize("option", ["out", "predictions"])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(option, tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in ("file/below", "" if option == "out" else "file"):
        line = error_line(capsys, "evaluate", "--questions=q", f"--{option}={tmp_path / place}")
        assert "is a folder: give" in line or "since" in line


BUCKET = "gs://bucket/run"
TRAIN = f"train --config={CONFIG} --workdir=w"
COMPRESSED = "is written uncompressed: give a name without ."


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ask --run w Who?", "'ragrl ask' does not take '--run': 'ragrl ask --help' lists its arg"),
        ("--bogus", "'ragrl --help' lists"),
        ("trian --workdir w", "did you mean 'train'?"),
        ("xyz", "unknown command 'xyz': run 'ragrl' to list"),
        ("plan", "unknown command 'plan': run 'ragrl config plan'"),
        ("serve retreiver", "did you mean 'retriever'? run 'ragrl serve' to list the commands\n"),
        ("train --config=nowhere.py --workdir=w", "nowhere.py does not exist: give one with a get"),
        ("train --config=real/c3po.py --workdir=w", "did you mean configs/real/c3po.py?"),
        ("train --config=configs/tiny/c3p0.py --workdir=w", "did you mean configs/tiny/c3po.py?"),
        (f"train --config={CONFIG.parents[2]}/pyproject.toml --workdir=w", "pyproject.toml"),
        (f"train --config={CONFIG}:preset --workdir=w", "preset"),
        (f"{TRAIN} --config.gard.patience=2", "did you mean guard?"),
        (f"{TRAIN} --config.run.steps.x=2", "no section"),
        # Addresses of buckets.
        *(
            (command, "mount the bucket")
            for command in (
                f"train --config={CONFIG} --workdir={BUCKET}",
                f"{TRAIN} --config.index.folder={BUCKET}",
                f"{TRAIN} --config.policy={BUCKET}",
                f"quickstart --workdir {BUCKET}",
                f"experiment run {BUCKET}",
                f"data world --out {BUCKET}",
                f"data index --corpus {BUCKET} --out i",
                f"export {BUCKET} --out o",
                f"evaluate --data x={BUCKET}",
                f"evaluate --data q.json@{BUCKET}",
                f"report {BUCKET}",
            )
        ),
        ("warmup pool --out o --temperatures 0.3,nan", "'0.3,nan' is not a list of numbers"),
        ("warmup demos --out o --writer labels --temperature nan", "invalid amount value: 'nan'"),
        ("bench credit --error inf", "invalid amount value: 'inf'"),
        ("bench credit --error -1", "invalid amount value: '-1'"),
        ("evaluate --questions q --limit -1", "--limit"),
        ("bench train --shape tiny --prompts 0", "--prompts"),
        ("replies c --out x.gz", COMPRESSED),
        ("data poison --corpus c --questions q --out x.jsonl.gz", COMPRESSED),
        ("data search i --questions q --run x.xz", COMPRESSED),
        ("warmup demos --writer labels --out x.zst", COMPRESSED),
        ("warmup pool --out x.bz2", COMPRESSED),
        ("evaluate --questions q --out x.gz", COMPRESSED),
        (f"warmup pool --config={CONFIG.with_name('coda.py')} --out o", "a pool is for opera"),
        ("export r --out o --public", "give --push-to OWNER/NAME"),
        ("export . --out o", "give the --workdir of a run"),
        ("bench train --shape qwen9", "no model size named 'qwen9'"),
        ("report none --serve", "is not a folder: start the run first"),
        *(
            (f"config plan --config={CONFIG.parent}/{name}.py --shape tiny --topology x", "only pl")
            for name in ("sft_c3po", "warmup", "vanilla_sft", "../warmup_c3po")
        ),
        ("data search nowhere q", "holds no complete index"),
        ("data search q", "give either one QUERY"),
        ("data search i q --retriever http://localhost:1", "one retriever is searched"),
        ("data search q --retriever nonsense", "is 'nonsense', without http:// or https://"),
        ("data search i q --queries f", "give either one QUERY"),
        ("data search i --queries absent.txt", "absent.txt"),
        *(
            (f"{command} {options}", message)
            for command in ("serve", "serve retriever nowhere")
            for options, message in (
                ("--host 0.0.0.0", "--no-api-key"),
                ("--api-key-file nowhere", "cannot read the API keys"),
                ("--allow-host a.*.example", "give NAME"),
                ("--deadline -1", "a deadline of -1"),
                ("--batch 9 --waiting 8", "at least a batch"),
            )
        ),
    ],
)
def test_a_wrong_command_is_refused_on_one_line(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        text = error_line(capsys, *command.split()) + "\n"
    except SystemExit as error:  # argparse
        assert error.code == 2
        text = capsys.readouterr().err
    assert message in text and {x.name for x in tmp_path.iterdir()} <= {"w"}


def test_a_key_that_the_config_omits_can_be_overridden():
    bounds = (("kl/mean", -1.0, 1.0),)
    url = {"index.kind": "remote", "index.url": "http://localhost:8000"}
    overrides = url | {"guard.bounds": bounds, "objective.entropy_coefficient": 0.1, "run.steps": 3}
    job = config_job("tiny/c3po", overrides)
    assert (job.index.url, job.guard.bounds) == ("http://localhost:8000", bounds)
    assert (job.run.steps, job.run.questions_per_step) == (3, 14)
    assert job.objective.entropy_coefficient == 0.1


@pytest.mark.parametrize(
    "file, category, origin",
    [
        (loop.__file__, UserWarning, ""),
        (loop.__file__, FutureWarning, ""),
        ("/usr/lib/python3/contextlib.py", UserWarning, ""),  # the caller of a context
        ("/venv/site-packages/other/math.py", RuntimeWarning, " (RuntimeWarning, other/math.py)"),
    ],
)
def test_a_warning_is_one_line_without_a_position_in_the_code(file, category, origin, capsys):
    error_line(capsys, "report", "nowhere")  # installs the format
    text = warnings.formatwarning(category("mind\nthe gap"), category, file, 3, "a line")
    assert text == f"ragrl: warning: mind the gap{origin}\n"


def test_without_a_command_the_map_of_commands_is_printed(capsys):
    for holder in HOLDERS:
        assert main([holder]) == 0
        text = capsys.readouterr().out
        names = _parser()[1][holder]
        assert all(re.search(rf"^    {name}\b", text, re.MULTILINE) for name in names)
    assert main([]) == 0
    text = capsys.readouterr().out
    names = re.findall(r"^  (\w+)  ", text, re.MULTILINE)
    commands = ["quickstart", "data", "warmup", "train", "evaluate", "serve"]
    assert [name for name in names if name in commands] == commands and len(names) <= 13
    assert all(f"\n{title}:\n" in text for title, _ in TITLES)


def test_config_options_accept_a_space_before_the_value(tmp_path, capsys):
    spaces = ("--config", str(CONFIG), "--config.optimizer.policy_lr", "-1e-3")
    equals = (f"--config={CONFIG}", "--config.optimizer.policy_lr=-1e-3")
    workdir = ("train", "--workdir", str(tmp_path / "w"))
    lines = [error_line(capsys, *workdir, *options) for options in (spaces, equals)]
    assert "policy_lr" in lines[0] and lines[0] == lines[1]
    line = error_line(capsys, *workdir, "--config", str(CONFIG), "--config.run.steps")
    assert "--config.run.steps has no value" in line


@pytest.mark.parametrize(
    "text, message",
    [
        ("import neighbor\n", "No module named 'neighbor': PYTHONPATH must include"),
        ("def get_config(:\n", "SyntaxError: invalid syntax (own.py, line 1)"),
        ("\nx = y\n", "NameError: name 'y' is not defined ({}, line 2)"),
        ("def get_config():\n  int('x')\n", "literal for int() with base 10: 'x' ({}, line 2)"),
        ("import json\njson.loads('')\n", "({}, line 2)"),  # not the line of the library
        ("x = 3\n", "module '{}' has no attribute 'get_config'"),
    ],
)
def test_a_config_that_fails_is_named_with_the_line(text, message, tmp_path, capsys):
    (tmp_path / "neighbor.py").touch()
    (tmp_path / "own.py").write_text(text)
    line = error_line(capsys, "config", "show", f"--config={tmp_path}/own.py")
    assert message.format(tmp_path / "own.py") in line


@pytest.mark.parametrize("key", ["system", "credit", "objective.advantage"])
def test_a_module_that_fails_is_named_with_the_line(key, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_module.py").write_text("\nx = y\n")
    start = ("train", f"--config={CONFIG}", f"--workdir={tmp_path}/w")
    for name, message in [
        ("failing_module:f", "name 'y' is not defined ({}/failing_module.py, line 2)"),
        ("./mine.py:f", "No module named '"),
        ("os:sep", "is not a callable object"),
    ][: 2 if key == "system" else 3]:
        given = name.removesuffix(":f") if key == "system" else name
        line = error_line(capsys, *start, f"--config.{key}={given}")
        assert message.format(tmp_path) in line and given in line


def test_config_options_with_a_blank_are_no_positional_arguments(capsys):
    options = [f"--config={CONFIG}", "--config.mesh=(1, 1, -1)", "--config.policy=my models/x"]
    assert main(["config", "show", *options]) == 0
    shown = capsys.readouterr().out
    assert "\nmesh = (1, 1, -1)" in shown and "\npolicy = 'my models/x'" in shown
    assert "one of them" in error_line(capsys, "config", "show", "x.py", *options)
    line = error_line(capsys, "config", "show", *options, "--config.run.stpes=3")
    assert "unknown config key config.run.stpes: did you mean steps?" in line
    line = error_line(capsys, "ask", *options, "Who?", "--workdir=none")
    assert "--config=FILE" in line and "does not take" not in line
    assert "does not take '--config.policy=" in error_line(capsys, "report", "none", options[-1])


COMMANDS = [f"{h} {x}".strip() for h, words in _parser()[1].items() for x in words]
CONFIGURED = ("train", "ask", "serve", "warmup tiny", "config plan")


def test_each_option_has_a_help_text_with_its_default_once(capsys):
    for command in COMMANDS:
        options = help_of(capsys, *command.split()).partition("options:")[2]
        lines = re.split(r"\n  (?=\S)", options)[1:]
        assert lines and all(re.search(r"\s{2,}\S", line) for line in lines), (command, lines)
        assert "--config=FILE" in options or command not in CONFIGURED
        assert all(len(re.findall("default", line)) <= 1 for line in lines), (command, lines)
        assert "(default: None)" not in options and "(default: False)" not in options
    text = " ".join(help_of(capsys, "evaluate").split())
    assert "questions per set, a random sample; 0 = all (default: 0)" in text


def help_of(capsys, *args: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*args, "--help"])
    return capsys.readouterr().out


def test_config_without_a_file_lists_the_shipped_configs(capsys):
    assert main(["config", "show"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert len(lines) == len([p for p in CONFIG.parents[1].rglob("[!_]*.py")])
    assert lines["configs/tiny/c3po.py"].startswith("C-3PO on the synthetic corpus")
    assert all(config_path(name).is_file() for name in lines)


def test_an_answer_from_the_synthetic_corpus_says_so(capsys, monkeypatch):
    """A user who brings a corpus would take it for an answer from that corpus."""
    stop = Mock(side_effect=UserError("stop"))
    monkeypatch.setattr("jax_ragrl.run.build.build_components", stop)
    assert main(["ask", "Who?"]) == 2
    assert "the shipped policy answers from the synthetic corpus" in capsys.readouterr().err
    assert main(["ask", "Who?", f"--config={CONFIG}"]) == 2
    assert capsys.readouterr().err == "ragrl: stop\n"


def test_a_text_that_the_terminal_lacks_is_shown_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    command = argparse.Namespace(name="", run=lambda _: print("€ \udcff é"))
    monkeypatch.setattr("jax_ragrl.cli.main._parse", lambda _: command)
    assert main([]) == 0
    assert out.buffer.getvalue() == b"\\u20ac \\udcff \xe9\n"


def test_a_start_imports_what_it_needs():
    code = """
import sys
from jax_ragrl.cli.main import main
assert main(["trian"]) == 2 and main([]) == 0
assert "jax" not in sys.modules and "numpy" not in sys.modules, "imported too early"
import jax_ragrl.training.loop
assert "torch" not in sys.modules, "imported by tensorboardX, if it is installed"
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


class Closed:
    """An object whose end raises an error that no caller can catch."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __del__(self) -> None:
        raise RuntimeError(self._message)


def test_echoes_of_a_failed_checkpoint_are_not_reported(monkeypatch):
    """Threads of TensorStore report to an event loop that the first error has closed."""
    reports = []
    monkeypatch.setattr("jax_ragrl.cli.main.DEFAULT_HOOK", reports.append)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    assert main(["trian"]) == 2
    for message in ("Event loop is closed", "another"):
        Closed(message)
    assert [str(event.exc_value) for event in reports] == ["another"]


def test_a_killed_division_is_finished_and_a_file_of_others_kept(tmp_path, capsys):
    file = tmp_path / "asked.csv"
    file.write_text("question,answer\n" + "".join(f"q{n}?,a\n" for n in range(10)))
    command = ["data", "split", str(file), "--shares", "0.7,0,0.3", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    counts = {"train": 7, "dev": 0, "test": 3, "out": str(tmp_path / "out")}
    assert json.loads(capsys.readouterr().out) == counts
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "test.jsonl",
        "train.jsonl",
    ]
    (tmp_path / "out" / "test.jsonl").unlink()  # as if killed before it
    assert main(command) == 0 and (tmp_path / "out" / "test.jsonl").is_file()
    (tmp_path / "out" / "train.jsonl").write_text("the user's own")
    assert main(command) == 2 and "train.jsonl exists" in capsys.readouterr().err


ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"
DEMO = {"role": "router", "prompt": "who directed", "reply": "film"}
HOLDER = """
import pathlib, sys
from jax_ragrl.run import lock
getattr(lock, sys.argv[1])(pathlib.Path(sys.argv[2]), "--out")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("command", "lock"),
    [
        (["warmup", "tiny"], "lock_folder"),
        (["warmup", "sft", f"--config={TINY / 'vanilla_sft.py'}"], "lock_folder"),
        (
            ["warmup", "sft", f"--config={TINY / 'sft_c3po.py'}", "--config.data.demos=DEMOS"],
            "lock_folder",
        ),
        (["data", "index", "--corpus=DEMOS", "--kind=bm25"], "lock_folder"),
        (["warmup", "demos", f"--config={TINY / 'mmoa_rag.py'}", "--writer=labels"], "lock_output"),
        (["warmup", "pool", f"--config={TINY / 'opera.py'}"], "lock_output"),
        (["evaluate", "--systems=direct", "--data=DEMOS@DEMOS"], "lock_folder"),
        (["bench", "retrieval", "--retrievers=bm25", "--data=DEMOS@DEMOS"], "lock_folder"),
    ],
    ids=lambda x: " ".join(x[:2]) if isinstance(x, list) else "",
)
def test_one_process_at_a_time_writes_results(command, lock, tmp_path, capsys):
    demos, out = tmp_path / "demos.jsonl", tmp_path / "results" / "out"
    demos.write_text(json.dumps(DEMO) + "\n")
    arguments = [x.replace("DEMOS", str(demos)) for x in command]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock, str(out)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        before = sorted(out.parent.rglob("*"))
        place = "--out" if command[0] in ("data", "warmup") else "--workdir"
        code = main([*arguments, f"{place}={out}"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1, lines
    assert f"{out} is in use by process {holder.pid}" in lines[0]
    assert f"another {place}" in lines[0]
    # Nothing of the other process was touched.
    assert sorted(out.parent.rglob("*")) == before
