"""Every line of a ledger file is sealed with all before it."""

import io

import pytest

from dpengine.errors import LedgerError
from dpengine.ledger_file.lines import entries_of, sealed


def written(count=4):
    lines, last = [], None
    for number in range(count):
        line, last = sealed(last, "note", {"text": f"n{number}", "value": 0.1 * number})
        lines.append(line)
    return lines


def read(lines):
    return [entry for entry, _ in entries_of(io.BytesIO(b"".join(lines)), "a.ledger")]


def test_written_lines_are_read_back():
    found = read(written())
    assert [(one.seq, one.kind, one.fields["text"], one.fields["value"]) for one in found] == [
        (number, "note", f"n{number}", 0.1 * number) for number in range(4)
    ]


def test_a_change_of_any_byte_is_detected():
    lines = written(2)
    data = b"".join(lines)
    for place in range(len(data)):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[place] ^= bit
            try:
                found = read([bytes(changed)])
            except LedgerError:
                continue
            assert len(found) == 1 and place >= len(lines[0])  # a last line that was not written up to its seal
            assert not bytes(changed).endswith(b"\n")


@pytest.mark.parametrize(
    "order",
    [(0, 2, 3), (1, 2, 3), (0, 2, 1, 3), (0, 1, 1, 2), (0, 1, 2, 2)],
    ids=lambda order: "".join(map(str, order)),
)
def test_removed_moved_or_repeated_lines_are_detected(order):
    lines = written()
    with pytest.raises(LedgerError, match=r"a\.ledger: line \d"):
        read([lines[place] for place in order])


def test_a_last_line_up_to_its_seal_counts():
    assert len(read([b"".join(written()).removesuffix(b"\n")])) == 4


@pytest.mark.parametrize("cut", [2, 20, 60])
def test_a_last_line_without_its_seal_is_ignored(cut):
    lines = written()
    data = b"".join(lines)[:-cut]
    entries = list(entries_of(io.BytesIO(data), "a.ledger"))
    assert len(entries) == 3 and entries[-1][1] == sum(map(len, lines[:3]))


def test_blocks_of_zeros_at_the_end_of_a_file_are_ignored():
    assert len(read([*written(), bytes(4096)])) == 4
