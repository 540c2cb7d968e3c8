"""What many rooms share: files that are whole or absent, trees of tensors, the dtype of sums, the device."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fastweights
from fastweights import FastWeightError
from fastweights.files import read_json, replacing, write_json, write_text
from fastweights.torch.devices import pick_device
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.tree import flatten, map_tensors, tensor_bytes, unflatten

PACKAGE = Path(fastweights.__file__).parent


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "deep" / "x.txt"
    write_text(path, "first")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("hal")
        raise KeyboardInterrupt
    assert path.read_text() == "first"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "corpus"
    full = pytest.raises(FastWeightError, match=r"cannot write .*corpus: No space left; nothing was kept")
    with full, replacing(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("a")
        raise OSError(28, "No space left")
    assert list(tmp_path.iterdir()) == []
    with replacing(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("a")
    assert [p.name for p in tmp_path.rglob("*")] == ["corpus", "a"]


def test_json(tmp_path):
    write_json(tmp_path / "x.json", dict(a=[1, 2]))
    assert read_json(tmp_path / "x.json", "numbers") == dict(a=[1, 2])
    with pytest.raises(FastWeightError, match=r"y.json does not exist; expected numbers"):
        read_json(tmp_path / "y.json", "numbers")


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Held:
    x: Any
    count: int


def test_a_tree_keeps_its_form():
    x = torch.arange(3.0)
    tree = Pair([x, None], dict(held=Held(x + 1, 5), names=("q", x + 2)))
    doubled = map_tensors(lambda t: 2 * t, tree)
    assert doubled.a[1] is None
    assert doubled.b["held"].count == 5
    assert doubled.b["names"][0] == "q"
    torch.testing.assert_close(doubled.a[0], 2 * x)
    torch.testing.assert_close(doubled.b["held"].x, 2 * (x + 1))
    torch.testing.assert_close(doubled.b["names"][1], 2 * (x + 2))


def test_a_tree_by_names_and_back():
    tree = Pair([torch.zeros(2), None], Pair(torch.ones(3, dtype=torch.float64), None))
    named = dict(flatten(tree))
    assert list(named) == ["a.0", "b.a"]
    back = unflatten(tree, named)
    assert type(back) is Pair
    assert back.b.a is tree.b.a
    assert back.a[1] is None
    assert tensor_bytes(tree) == 2 * 4 + 3 * 8
    with pytest.raises(FastWeightError, match=r"b.a is missing from the saved state"):
        unflatten(tree, {"a.0": named["a.0"]})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_kept_in_float32_or_wider(dtype):
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert accumulation_dtype(dtype) == accumulation_dtype(torch.zeros(1, dtype=dtype)) == wanted


def test_the_same_in_jax():
    jnp = pytest.importorskip("jax.numpy")
    from fastweights.jax.dtypes import accumulation_dtype as of

    for like in (jnp.bfloat16, "float16", jnp.zeros(1, jnp.float16), jnp.float32):
        assert jnp.dtype(of(like)) == jnp.float32
    assert jnp.dtype(of("float64")) == jnp.dtype("float64")


def test_devices():
    assert pick_device("cpu") == "cpu"
    with pytest.raises(FastWeightError, match="device is 'tpu'; expected auto, cpu or cuda"):
        pick_device("tpu")


def test_there_is_one_writer_of_files():
    writes = re.compile(r"os\.(replace|rename)\(|import tempfile|\.rename\(|temp\w*\.replace\(|\.part\"")
    found = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if writes.search(p.read_text())}
    assert found == {"files.py"}
