"""A part of a matrix has the noise of its places, as if the whole had been drawn."""

import pytest
import torch

from dpengine.noise import NoiseSource
from dpengine.noise.keyed_streams import STREAM_KINDS

# The first place, rows, their length, and places between two rows.
CUTS = [(0, 1, 1, 0), (3, 5, 7, 11), (1000, 400, 300, 2), (7, 300, 600, 5000), (511, 2, 9, 4096)]


@pytest.mark.one_in(3, "kind", "dtype", "cut", others="slow")
@pytest.mark.parametrize("kind", STREAM_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cut", CUTS)
def test_rows_have_the_normals_of_their_places(kind, dtype, cut):
    start, rows, length, gap = cut
    stride, source = length + gap, NoiseSource.seeded(3, kind)
    span = (rows - 1) * stride + length
    whole = source.normal_(torch.empty(span, dtype=dtype), domain="noise", step=4, start=start)
    expected = whole.as_strided((rows, length), (stride, 1)).flatten()
    found = torch.zeros(rows * length, dtype=dtype)
    source.add_normal_(found, 1.0, domain="noise", step=4, start=start, rows=rows, stride=stride)
    assert torch.equal(found, expected)
    source.add_normal_(found, 2.0, domain="noise", step=4, start=start, rows=rows, stride=stride, scale=0.5)
    torch.testing.assert_close(found, 1.5 * expected)


@pytest.mark.parametrize(("rows", "stride"), [(3, 4), (7, 1), (0, 5), (-1, 5)])
def test_rows_that_do_not_fit_are_refused(rows, stride):
    with pytest.raises(ValueError, match=r"do not form .* rows"):
        NoiseSource.seeded(3).add_normal_(torch.zeros(14), 1.0, domain="noise", step=0, rows=rows, stride=stride)
