"""Random damage to files: to their bytes, and to their JSON values."""

import json

STRANGE = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"),
    float("inf"), "", "x", "tensor", "GaussianEvent", "../../etc/passwd", "\ud800", "1" * 400, [], {}, [[]], [None],
    {"": 0}, {"tensor": "x"}, {"pairs": [[1, 2]]}, {"event": "eval", "count": 1},
]  # fmt: skip
PICKLES = [b"\x80\x04\x95", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x02cposix\nsystem\n", b"PK\x03\x04"]


def bent(choose, whole):
    """Returns the bytes after random truncation, bit flips, deletion, insertion or duplication."""
    for _ in range(choose.choice((1, 1, 1, 2, 5))):
        place, length = choose.randrange(len(whole) + 1), choose.choice((1, 1, 2, 8, 64))
        kind = choose.randrange(6)
        if kind == 0:
            whole = whole[:place]
        elif kind == 1 and place < len(whole):
            whole = whole[:place] + bytes([whole[place] ^ (1 << choose.randrange(8))]) + whole[place + 1 :]
        elif kind == 2:
            whole = whole[:place] + whole[place + length :]
        elif kind == 3:
            whole = whole[:place] + choose.randbytes(length) + whole[place:]
        elif kind == 4:
            whole = whole[:place] + whole[place : place + length] + whole[place:]
        else:
            whole = choose.choice(PICKLES) + whole[place:]
    return whole


def exchanged(choose, tree):
    """Changes, deletes, adds or copies one value of a JSON tree, in place."""
    places = list(_places(tree))
    owner, key = choose.choice(places)
    kind = choose.randrange(4)
    if kind == 0 or not isinstance(owner, dict):
        owner[key] = choose.choice(STRANGE)
    elif kind == 1:
        del owner[key]
    elif kind == 2:
        owner[choose.choice(("", "x", key + "s", "count"))] = choose.choice(STRANGE)
    else:
        other, name = choose.choice(places)
        owner[key] = json.loads(json.dumps(other[name]))
    return tree


def _places(tree):
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from _places(value)
