"""Mutations of real files: of their bytes, and of what they hold with a right checksum, as a stranger could make."""

import copy
import json

from fastweights.files import CHECKSUM, write_checked_json
from fastweights.tensor_files import write_tensors

HOSTILE = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "../../etc/passwd", "/dev/zero", "<script>alert(1)</script>", "\0", "\ud800", "9" * 5000, [], {}, [[]],
    [None], {"": {}}, "delta*1000000000", "hf:nobody/nothing", "bpe:1000000000",
)  # fmt: skip
NUMBERS = (b"0", b"-1", b"1e999", b"99999999999999999999", b"NaN", b"1" * 400)


def mutate_bytes(rng, content, others):
    """A few changes to the bytes of a file.  others: files to take pieces from."""
    content = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        n = len(content)
        at = int(rng.integers(0, n + 1))
        size = int(rng.integers(1, 1 + min(64, n + 1)))
        kind = int(rng.integers(0, 9))
        if kind == 0 and n:
            content[at % n] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1 and n:
            content[at % n] = int(rng.integers(0, 256))
        elif kind == 2:
            del content[at:]
        elif kind == 3:
            del content[at : at + size]
        elif kind == 4:
            content[at:at] = rng.bytes(size)
        elif kind == 5:
            content[at : at + size] = b"\xff" * size if rng.integers(0, 2) else b"\0" * size
        elif kind == 6:
            content[at:at] = content[at : at + size] * int(rng.integers(1, 20))
        elif kind == 7:
            other = others[int(rng.integers(0, len(others)))]
            start = int(rng.integers(0, len(other) + 1))
            content[at : at + size] = other[start : start + size]
        else:  # one of the numbers in a text
            digits = [i for i in range(min(n, 4000)) if 48 <= content[i] < 58]
            if digits:
                i = digits[int(rng.integers(0, len(digits)))]
                content[i : i + 1] = NUMBERS[int(rng.integers(0, len(NUMBERS)))]
    return bytes(content)


def mutate_json(rng, content):
    """A value of a JSON object replaced by a hostile one, removed, or kept under another name."""
    content = copy.deepcopy(content)
    places = []

    def walk(node):
        keys = list(node) if isinstance(node, dict) else range(min(len(node), 50))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(content)
    for _ in range(int(rng.integers(1, 3))):
        node, key = places[int(rng.integers(0, len(places)))]
        if (isinstance(node, list) and key >= len(node)) or (isinstance(node, dict) and key not in node):
            continue
        kind = int(rng.integers(0, 8))
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[f"{key}x"] = node.pop(key)
        elif kind == 2 and isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
            node[key] = -node[key] if rng.integers(0, 2) else node[key] * 1000 + 1
        else:
            node[key] = copy.deepcopy(HOSTILE[int(rng.integers(0, len(HOSTILE)))])
    return content


def write_mutated_json(rng, path, content):
    """`content` without its checksum, mutated, with a checksum that is right."""
    mutated = mutate_json(rng, {n: x for n, x in content.items() if n != CHECKSUM})
    try:
        write_checked_json(path, mutated)
    except UnicodeEncodeError:  # half a character is no text
        path.write_bytes(json.dumps(mutated).encode())


def write_mutated_tensors(rng, path, tensors, about):
    """Tensors of other names, shapes, dtypes and values, and other metadata, with a checksum that is right."""
    import torch

    tensors, about = dict(tensors), dict(about)
    names = sorted(tensors)
    for _ in range(int(rng.integers(1, 3))):
        name, kind = names[int(rng.integers(0, len(names)))], int(rng.integers(0, 8))
        if name not in tensors:
            continue
        x = tensors[name]
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[f"{name}.x"] = tensors.pop(name)
        elif kind == 2:
            tensors[name] = x[None]
        elif kind == 3:
            tensors[name] = x.flatten()[: int(rng.integers(0, x.numel() + 1))]
        elif kind == 4:
            kinds = (torch.float64, torch.int8, torch.bool, torch.bfloat16, torch.int64)
            tensors[name] = x.to(kinds[int(rng.integers(0, len(kinds)))])
        elif kind == 5:
            tensors[name] = torch.zeros(*x.shape, 0)
        elif about:
            key = sorted(about)[int(rng.integers(0, len(about)))]
            about[key] = ("", "-1", "9" * 5000, "x", "{}", "null", "[1]", "1.5", "٣")[int(rng.integers(0, 9))]
    write_tensors(path, tensors, about)
