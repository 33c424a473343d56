"""Checkpoints of a small tree are retained, restored or refused."""

import contextlib
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner import checkpoint
from jax_ragrl.learner.checkpoint import Checkpoints, DamagedCheckpointError, checksums


class Tree(NamedTuple):
    """A tree whose fields are not in alphabetical order."""

    second: jax.Array
    first: jax.Array


def tree(value: float, size: int = 2) -> Tree:
    return jax.device_put(Tree(np.full(size, value, np.float32), np.full(size, -value, np.float32)))


def test_a_step_is_restored_exactly_and_two_are_retained(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2, 3):
            checkpoints.save(step, tree(step), {"data": f"at {step}"})
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.latest() == 3
        assert sorted(x.name for x in checkpoints.folder.iterdir()) == ["2", "3"]
        for step in (2, 3):
            state, meta = checkpoints.restore(step, tree(0))
            assert (meta["step"], meta["data"]) == (step, f"at {step}")
            assert [x.tolist() for x in jax.device_get(state)] == [[step] * 2, [-step] * 2]


def test_a_step_that_is_not_the_newest_is_refused_until_later_ones_are_deleted(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path, keep=3)) as checkpoints:
        for step in (1, 4, 6):
            checkpoints.save(step, tree(step), {})
        for step in (3, 6):
            with pytest.raises(UserError, match=rf"checkpoint {step} is not saved, .*6 is not old"):
                checkpoints.save(step, tree(step), {})
        checkpoints.wait()
        checkpoints.delete_from(3)
        assert checkpoints.steps() == [1]
        checkpoints.save(3, tree(3), {})
        assert checkpoints.wait() == 3 and checkpoints.steps() == [1, 3]


def test_a_part_restores_its_own_paths_only(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, {"a": tree(1), "b": tree(2, 3)}, {})
        part = checkpoints.restore_part(1, {"b": tree(0, 3)})
        assert jax.device_get(part["b"].first).tolist() == [-2] * 3
        with pytest.raises(UserError, match=r"b/first of shape \[3\], .* needs \[2\]"):
            checkpoints.restore_part(1, {"b": tree(0)})
        with pytest.raises(UserError, match=r"c/first of shape None, .* needs \[2\]"):
            checkpoints.restore_part(1, {"c": tree(0)})
        with pytest.raises(UserError, match=r"a/first of shape \[2\], .* needs None"):
            checkpoints.restore(1, {"b": tree(0, 3)})
        shutil.rmtree(checkpoints.folder / "1")
        with pytest.raises(UserError, match="was removed while it was read: .* run the same"):
            checkpoints.restore_part(1, {"b": tree(0, 3)})


def test_bytes_are_restored_exactly_and_checked(tmp_path):
    data = bytes(range(256)) * 500
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, tree(1), {"data": "a", "forest": b"old"})
        checkpoints.save(2, tree(2), {"data": "b", "forest": data})
        checkpoints.wait()
        assert "forest" not in checkpoints.meta(2)  # the JSON object stays small
        _, meta = checkpoints.restore(2, tree(0))
        assert (meta["data"], meta["forest"]) == ("b", data)
        file = _largest_data_file(checkpoints.folder / "2" / "contents")
        file.write_bytes(file.read_bytes()[:-100] + bytes(100))
        with pytest.warns(UserWarning, match="checkpoint 2 .* damaged-2"):
            step, _, meta = checkpoints.restore_newest(tree(0))
        assert (step, meta["forest"]) == (1, b"old")


def _save_three(folder) -> Checkpoints:
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, tree(step), {"data": f"at {step}"})
    return Checkpoints(folder)


def _largest_data_file(folder):
    return max((x for x in folder.glob("**/d/*") if x.is_file()), key=lambda x: x.stat().st_size)


def _cut(folder):
    file = _largest_data_file(folder / "state")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _write_metadata(folder, text):
    for file in (folder / "meta").iterdir():
        file.write_text(text)


DAMAGE = {
    "cut": _cut,
    "metadata empty": lambda x: _write_metadata(x, ""),
    "metadata a list": lambda x: _write_metadata(x, "[]"),
    "state missing": lambda x: shutil.rmtree(x / "state"),
    "manifest missing": lambda x: [m.unlink() for m in (x / "state").glob("**/manifest.ocdbt")],
    "everything missing": lambda x: [shutil.rmtree(y) for y in x.iterdir() if y.is_dir()],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path, name):
    with contextlib.closing(_save_three(tmp_path)) as checkpoints:
        DAMAGE[name](checkpoints.folder / "3")
        with pytest.warns(UserWarning, match="checkpoint 3 .* damaged-3"):
            step, state, meta = checkpoints.restore_newest(tree(0))
        assert (step, meta["data"], state.second.tolist()) == (2, "at 2", [2.0, 2.0])
        # The step can be saved again.
        checkpoints.save(3, tree(3), {"data": "again"})
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.restore_newest(tree(0))[2]["data"] == "again"


def test_metadata_of_any_json_values_is_restored(tmp_path):
    values = {"nan": np.nan, "pair": (1, 2.5), "by number": {10: "é", 9: None}}
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, tree(1), values)
        checkpoints.wait()
        meta = checkpoints.restore(1, tree(0))[1]
        assert meta["by number"] == {"10": "é", "9": None} and meta["pair"] == [1, 2.5]


def test_a_flipped_bit_in_any_byte_of_the_metadata_is_damage_or_changes_nothing(tmp_path):
    draw = np.random.default_rng(0)
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, tree(1), {"data": {"epoch": 3, "order": [2, 0, 1]}})
        checkpoints.wait()
        expected = checkpoints.meta(1)
        file = checkpoints.folder / "1" / "meta" / "metadata"
        content = file.read_bytes()
        for i in range(len(content)):
            changed = bytearray(content)
            changed[i] ^= 1 << draw.integers(8)
            file.write_bytes(changed)
            with contextlib.suppress(DamagedCheckpointError):
                assert checkpoints.meta(1) == expected, bytes(changed)


def test_a_step_that_is_damaged_again_is_set_aside_again(tmp_path):
    with contextlib.closing(_save_three(tmp_path)) as checkpoints:
        for name in ("damaged-3", "damaged-3-2", "damaged-3-3"):
            _cut(checkpoints.folder / "3")
            with pytest.warns(UserWarning, match=f"renamed to {name}, "):
                assert checkpoints.restore_newest(tree(0))[0] == 2
            assert (checkpoints.folder / name).is_dir()
            checkpoints.save(3, tree(3), {"data": "again"})
            checkpoints.wait()


def test_other_values_than_were_saved_are_damage(tmp_path, monkeypatch):
    right = checkpoint.checksums
    monkeypatch.setattr(checkpoint, "checksums", lambda x: {k: v ^ 1 for k, v in right(x).items()})
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, tree(1), {})
    monkeypatch.undo()
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        with pytest.raises(
            DamagedCheckpointError, match="second has other values.*remove this folder"
        ):
            checkpoints.restore(1, tree(0))
        with (
            pytest.warns(UserWarning, match="damaged-1"),
            pytest.raises(UserError, match="no intact checkpoint"),
        ):
            checkpoints.restore_newest(tree(0))


@pytest.mark.parametrize("dtype", [np.float32, "bfloat16", np.int32, np.uint8, np.bool_])
def test_a_checksum_notices_every_flipped_bit(dtype):
    x = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(jnp.dtype(dtype))
    before = checksums({"x": jax.device_put(x)})["x"]
    bits = x.view(np.uint8).copy()
    for i in range(bits.size):
        for k in range(1 if dtype == np.bool_ else 8):
            flipped = bits.copy()
            flipped.reshape(-1)[i] ^= 1 << k
            changed = flipped.view(x.dtype).reshape(x.shape)
            assert checksums({"x": jax.device_put(changed)})["x"] != before


def test_a_checksum_does_not_depend_on_the_sharding():
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh = jax.make_mesh((8,), ("data",))
    shard = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    swapped = jax.device_put(x[:, ::-1].copy())
    sums = [checksums({"x": y})["x"] for y in (shard, jax.device_put(x), swapped)]
    assert sums[0] == sums[1] != sums[2]
