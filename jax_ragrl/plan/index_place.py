"""The place of exact indexes: the devices of each host, or one server per host."""

from __future__ import annotations

from typing import Any

from jax_ragrl.plan.other_models import OtherModels

DEVICES, SERVER = "devices", "server"
# The config of a run that asks a server on its own host ('ragrl serve retriever').
REMOTE = {"index.kind": "remote", "index.url": "http://localhost:8001"}


def index_place(others: OtherModels, peak: int, memory: int | None) -> dict[str, Any]:
    """Chooses the place of the exact indexes of a run and of their encoders; empty without any.

    `peak` are the bytes of the fullest device with all models, `memory` those of a device, if
    known. Returns `device_bytes` of indexes, encoders and searches, and the `place`: `DEVICES`, or
    `SERVER` if the run fits without them alone.
    """
    if not any(name.startswith("index") for name in others.sections):
        return {}
    own = others.search_bytes
    needs_server = memory is not None and peak - own < memory <= peak
    return {"place": SERVER if needs_server else DEVICES, "device_bytes": own}
