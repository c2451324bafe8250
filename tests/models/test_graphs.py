"""Layers of PyTorch Geometric on its batches of graphs, against a loop over single graphs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpengine import PrivacyEngine

pytestmark = pytest.mark.nightly
geometric = pytest.importorskip("torch_geometric")

EXAMPLES, BATCH = 24, 8
LAYERS = {
    "GCNConv": {},
    "GATConv": {},
    "SAGEConv": {},
    "TransformerConv": {},
    "GINConv": {"nn": nn.Linear(4, 8)},
    "GraphConv": {},
}


class Network(nn.Module):
    def __init__(self, name, options):
        super().__init__()
        kind = getattr(geometric.nn, name)
        self.layer = kind(**copy.deepcopy(options)) if "nn" in options else kind(4, 8, **options)
        self.head = nn.Linear(8, 3)

    def forward(self, batch):
        hidden = self.layer(batch.x, batch.edge_index).tanh()
        return self.head(geometric.nn.global_mean_pool(hidden, batch.batch, batch.num_graphs))


def graphs():
    made = torch.Generator().manual_seed(0)
    for i in range(EXAMPLES):
        nodes = 2 + i % 5
        edges = torch.randint(nodes, (2, 2 * nodes), generator=made)
        x = torch.randn(nodes, 4, generator=made)
        yield geometric.data.Data(x=x, edge_index=edges, y=torch.tensor([i % 3]))


def gradients_of(model, batch):
    for i in range(batch.num_graphs):
        one = geometric.data.Batch.from_data_list([batch.get_example(i)])
        yield torch.autograd.grad(F.cross_entropy(model(one), one.y), list(model.parameters()))


def norm_of(gradient):
    return torch.cat([part.flatten() for part in gradient]).norm()


@pytest.mark.filterwarnings("ignore:.*DPE012")
@pytest.mark.parametrize("name", LAYERS)
def test_clipped_sums_equal_those_of_a_loop_over_graphs(name):
    torch.manual_seed(0)
    model, data = Network(name, LAYERS[name]), list(graphs())
    plain = copy.deepcopy(model)
    everyone = geometric.data.Batch.from_data_list(data)
    max_norm = torch.stack([norm_of(gradient) for gradient in gradients_of(plain, everyone)]).median().item()
    model, optimizer, loader = PrivacyEngine(seed=1).make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        geometric.loader.DataLoader(data, batch_size=BATCH),
        noise_multiplier=0.0,
        max_grad_norm=max_norm,
        grad_sample_mode="whole_model",
        example_input=data[0],
    )
    for batch in loader:
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(model(batch), batch.y).backward()
        optimizer.step()
        rows = [(min(1.0, max_norm / norm_of(row)), row) for row in gradients_of(plain, batch)]
        for k, p in enumerate(model.parameters()):
            total = sum(factor * row[k] for factor, row in rows)
            torch.testing.assert_close(BATCH * p.grad, total, rtol=1e-4, atol=1e-5)
