"""Random damage to the bytes or the JSON values of a file."""

import json

UNUSUAL_VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"),
    float("inf"), "", "x", "tensor", "GaussianEvent", "../../etc/passwd", "\ud800", "1" * 400, [], {}, [[]], [None],
    {"": 0}, {"tensor": "x"}, {"pairs": [[1, 2]]}, {"event": "eval", "count": 1},
]  # fmt: skip
PICKLES = [b"\x80\x04\x95", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x02cposix\nsystem\n", b"PK\x03\x04"]


def damage_bytes(choose, whole):
    """Returns the bytes after random truncation, bit flips, deletion, insertion or duplication."""
    for _ in range(choose.choice((1, 1, 1, 2, 5))):
        position, length = choose.randrange(len(whole) + 1), choose.choice((1, 1, 2, 8, 64))
        kind = choose.randrange(6)
        if kind == 0:
            whole = whole[:position]
        elif kind == 1 and position < len(whole):
            whole = whole[:position] + bytes([whole[position] ^ (1 << choose.randrange(8))]) + whole[position + 1 :]
        elif kind == 2:
            whole = whole[:position] + whole[position + length :]
        elif kind == 3:
            whole = whole[:position] + choose.randbytes(length) + whole[position:]
        elif kind == 4:
            whole = whole[:position] + whole[position : position + length] + whole[position:]
        else:
            whole = choose.choice(PICKLES) + whole[position:]
    return whole


def damage_tree(choose, tree):
    """Changes, deletes, adds or copies one value of a JSON tree, in place."""
    positions = list(_positions(tree))
    owner, key = choose.choice(positions)
    kind = choose.randrange(4)
    if kind == 0 or not isinstance(owner, dict):
        owner[key] = choose.choice(UNUSUAL_VALUES)
    elif kind == 1:
        del owner[key]
    elif kind == 2:
        owner[choose.choice(("", "x", key + "s", "count"))] = choose.choice(UNUSUAL_VALUES)
    else:
        other, name = choose.choice(positions)
        owner[key] = json.loads(json.dumps(other[name]))
    return tree


def _positions(tree):
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from _positions(value)
