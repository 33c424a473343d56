"""A plan as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_ragrl.plan.other_models import SERVER

Row = tuple[str, str]
UNITS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def plan_text(result: Mapping[str, Any]) -> str:
    """Returns a plan as a table of two columns; `ragrl config plan --json` prints all numbers."""
    rows = [*_memory(result), *_work(result)]
    for name, value in result.get("changes", {}).items():
        text = str(value).replace(" ", "")  # command lines split at spaces
        rows.append(("set", f"--config.{name}=" + (f'"{text}"' if "(" in text else text)))
    rows += [("not counted", message) for message in result["uncounted"]]
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows) + "\n"
    return text + steps_text(result.get("steps", ()))


def _memory(result: Mapping[str, Any]) -> Iterator[Row]:
    mesh = ", ".join(f"{name} {size}" for name, size in result["mesh"].items())
    update, sampling = result["update"], result["sampling"]
    yield "devices", f"{result['devices']} x {result['device']}, mesh {mesh}"
    yield "state", f"{size_text(result['state_bytes'])} per device"
    rows, length = update["rows"]
    yield f"update, {rows} x {length} tokens", size_text(update["bytes"])
    prompts, length = sampling["prompts"]
    weights = size_text(sampling["weight_bytes"])
    host = " per host" if sampling["devices"] < result["devices"] else ""
    name = f"sampling{host}, {prompts} x {length} tokens, width {sampling['width']}"
    yield name, f"{size_text(sampling['bytes'])}, of which weights {weights}"
    for section, facts in result["other_models"].items():
        time = facts.get("seconds_at_least")
        search = f", {facts['queries']} queries in at least {time_text(time)}" if time else ""
        yield section, size_text(facts["weight_bytes"]) + search
    if place := result["index_place"]:
        size = f"{size_text(place['device_bytes'])} per device"
        server = f"a server per host ('ragrl serve retriever'): {size} is too much"
        on_devices = f"on the devices of each host, {size}"
        yield "place of the index", server if place["place"] == SERVER else on_devices
    memory, fits = result["memory_bytes"], result["fits"]
    limit = f" of {size_text(memory)}" if memory else ""
    verdict = {True: ", fits", False: ", does not fit", None: ""}[fits]
    yield "peak", f"{size_text(result['peak_bytes'])}{limit}{verdict}"
    yield "checkpoint on disk", size_text(result["checkpoint_bytes"])


def _work(result: Mapping[str, Any]) -> Iterator[Row]:
    parts = {
        "gradient": result["update"],
        "prefill": result["sampling"]["prefill"],
        "decode step": result["sampling"]["decode_step"],
    }
    for name, work in parts.items():
        flops, traffic = number_text(work["flops"]), size_text(work["hbm_bytes"])
        yield name, f"{flops}FLOP, {traffic} of device memory, {work['kernels']} kernels"
        for kind, facts in work["collectives"].items():
            yield f"  {kind}", f"{facts['count']}, {size_text(facts['bytes'])}"
    programs, passes = result["programs"], result["passes"]
    yield "passes of an update", f"{passes['gradients']} gradients, {passes['scores']} scores"
    yield "programs at most", f"{programs['sampler']} sampler, {programs['update']} update"
    yield "compiling all of them here", f"about {time_text(result['compile_s'])}, one by one"
    # Devices without a data sheet, such as a CPU, have no bounds.
    if speed := result["speed"]:
        for name in ("gradient", "prefill", "decode_step"):
            time, rate = speed[name], number_text(speed[name]["tokens_per_s_at_most"])
            text = (
                f"{time_text(time['seconds_at_least'])} ({time['bound']}), at most {rate}tokens/s"
            )
            yield f"least time, {name.replace('_', ' ')}", text


def steps_text(steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns the simulated steps (see `simulate`) as a table; empty without any."""
    if not steps:
        return ""
    names = ("devices", "rollout_s", "update_s", "sync_s", "host_s", "step_s", "tokens_per_s")
    lines = ["  ".join(f"{name:>12}" for name in names)]
    for step in steps:
        lines.append("  ".join(f"{step[name]:>12.4g}" for name in names))
    return "\n" + "\n".join(lines) + "\n"


def number_text(value: float) -> str:
    """Returns a number with three digits and a decimal prefix, such as `1.23 G`."""
    unit, scale = next((pair for pair in UNITS if abs(value) >= pair[1]), UNITS[-1])
    return f"{value / scale:.3g} {unit}"


def size_text(value: float) -> str:
    """Returns bytes as text, such as `1.23 GB`."""
    return f"{number_text(value)}B"


def time_text(seconds: float) -> str:
    """Returns a duration as text, such as `1.23 ms`."""
    unit, scale = next((pair for pair in SECONDS if seconds >= pair[1]), SECONDS[-1])
    return f"{seconds / scale:.3g} {unit}"
