"""Models of four libraries, each trained privately and compared with a loop over samples: the table of docs/models.md.

``pytest tests/models -m nightly --write-models docs/models.md`` writes the page.
"""

import importlib.util
import warnings

import pytest
import torch
from torch import nn

from dpengine import check, fix
from models import adapters, hugging_face, image_models
from models.row import DTYPES
from models.verdict import Verdict, Wrong, verdict_of

pytestmark = pytest.mark.nightly

ROWS = [*hugging_face.rows(), *adapters.rows(), *image_models.rows()]
# In the library's own code, Lily mixes samples, and CPT writes a parameter in its forward pass.
REJECTED = {"Lily": "DPE001", "CPT": "DPE026"}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_model_gives_exact_clipped_sums_or_is_rejected_with_the_expected_code(row, dtype, record_property):
    if importlib.util.find_spec(row.library) is None:
        pytest.skip(f"{row.library} is not installed: pip install 'dpengine[test-models]'")
    if dtype not in row.dtypes:
        record_property("row", [row.group, row.name, str(dtype), "not supported", "", ""])
        pytest.skip("the library cannot run this model in this dtype")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        try:
            verdict = verdict_of(row, dtype)
        except Wrong as error:
            verdict = Verdict("wrong", "", str(error))
    record_property("row", [row.group, row.name, str(dtype), verdict.state, verdict.by, verdict.reason])
    if row.name in REJECTED:
        assert verdict.state == "rejected" and REJECTED[row.name] in verdict.by
    else:
        assert verdict.state == "exact", verdict.reason


EVOLVED = [f"EvoNorm2d{letter}{number}" for letter in "BS" for number in range(3)]
BATCH_NORMS = ["BatchNormAct2d", "SyncBatchNormAct", "SplitBatchNorm2d", "FrozenBatchNormAct2d", "FrozenBatchNorm2d"]


@pytest.mark.parametrize("name", [*BATCH_NORMS, *EVOLVED, "FilterResponseNormAct2d", "GroupNormAct", "LayerNormAct2d"])
def test_fix_makes_timm_norms_independent_across_samples(name):
    layers = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    made = (getattr(layers, name, None) or getattr(layers.norm_act, name, None) or frozen())(64)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), made).train()
    fixed, _ = fix(model)
    assert check(fixed).ok
    images = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(fixed(images)[:1], fixed(images[:1]), rtol=1e-4, atol=1e-5)
    assert all(p.data_ptr() != q.data_ptr() for p, q in zip(fixed.parameters(), model.parameters(), strict=False))


def frozen():
    return pytest.importorskip("torchvision.ops.misc").FrozenBatchNorm2d


def test_the_table_has_no_duplicate_rows():
    names = [(row.group, row.name) for row in ROWS]
    assert len(names) == len(set(names))
