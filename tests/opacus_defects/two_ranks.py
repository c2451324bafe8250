"""Functions of two processes in tests of distributed training, in a module of its own: they are imported by name."""

import copy
import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

FEATURES, CLASSES, ROWS = 4, 3, 6  # rows of one process
CRITERION = nn.CrossEntropyLoss()


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def batch(rows=2 * ROWS):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, FEATURES, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def compat_step(package, wrapper, mode, clipping, noise_multiplier):
    """One step of this rank on its half of the rows: the sum over all rows, by name, and the weights after it."""
    opacus = importlib.import_module(package)
    model = mlp()
    if dist.get_rank():
        with torch.no_grad():
            model[0].weight.fill_(7.0)  # the wrapper makes the ranks alike
    kinds = {
        "DPDDP": importlib.import_module(f"{package}.distributed").DifferentiallyPrivateDistributedDataParallel,
        "DDP": nn.parallel.DistributedDataParallel,
    }
    spread = kinds[wrapper](model)
    bounds = [0.3] * 4 if clipping == "per_layer" else 0.6
    found = opacus.PrivacyEngine().make_private(
        module=spread,
        optimizer=torch.optim.SGD(spread.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.arange(2 * ROWS)), batch_size=2 * ROWS),  # of both ranks together
        noise_multiplier=noise_multiplier,
        max_grad_norm=bounds,
        clipping=clipping,
        grad_sample_mode=mode,
    )
    private, optimizer, loader = found[0], found[1], found[-1]
    criterion = found[2] if len(found) == 4 else CRITERION
    x, y = batch()
    before = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    for (mine,) in loader:
        optimizer.zero_grad()
        criterion(private(x[mine]), y[mine]).backward()
        optimizer.step()
    sums = {name: p.grad.double() * 2 * ROWS for name, p in model.named_parameters()}
    return {"before": before, "sums": sums, "weights": dict(model.state_dict())}


def default_step(clipping):
    """The same in the default engine, under torch's own wrapper, with each row drawn."""
    model = mlp()
    spread = nn.parallel.DistributedDataParallel(model)
    x, y = batch()
    engine = PrivacyEngine(seed=0)
    _, optimizer, loader = engine.make_private(
        spread,
        torch.optim.SGD(spread.parameters(), lr=0.1),
        DataLoader(TensorDataset(x, y), batch_size=2 * ROWS),
        noise_multiplier=0.0,
        clipping=clipping,
        max_grad_norm=[0.3] * 2 if clipping == "per_layer" else 0.6,
    )
    sizes = []
    for inputs, targets in loader:
        sizes.append(len(inputs))
        optimizer.zero_grad()
        CRITERION(spread(inputs), targets).backward()
        optimizer.step()
    sums = {name: p.grad.double() * 2 * ROWS for name, p in model.named_parameters()}
    return {"sums": sums, "weights": dict(model.state_dict()), "sizes": sizes}
