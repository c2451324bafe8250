"""External batches."""

import pytest

from dpengine.sampling.external import ExternalBatches


def test_external_batches_are_never_drawn():
    scheme = ExternalBatches(4)
    assert (scheme.expected_batch_size, scheme.sample_rate, scheme.claims_epsilon) == (4.0, 1.0, False)
    with pytest.raises(TypeError, match="training loop"):
        scheme.draw(0, None)
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="ExternalBatches"):
            ExternalBatches(wrong)
