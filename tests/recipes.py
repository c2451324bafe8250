"""The recipes of docs/extending.md, and small private runs with them."""

import warnings
from typing import Any

import torch
from snippets import snippets_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.noise import BandMF

STEPS = 12
NAMES = ("Soft", "Decaying", "Bernoulli", "FewOrders", "Scale")


def code_of(name: str) -> str:
    """Returns the code block of the page that defines a class."""
    (block,) = [one.code for one in snippets_of("docs/extending.md") if f"class {name}" in one.code]
    return block


def recipe(name: str) -> type:
    """Returns the class that a block of the page defines."""
    found: dict[str, Any] = {"__name__": "recipe"}
    exec(code_of(name), found)
    return found[name]  # type: ignore[no-any-return]


OPTIONS = {
    "Soft": lambda: {"clipping": recipe("Soft")(1.0)},
    "Decaying": lambda: {"noise": recipe("Decaying")()},
    "Bernoulli": lambda: {"sampling": recipe("Bernoulli")(0.25)},
    "FewOrders": dict,
    "Scale": dict,
    "BandMF": lambda: {"noise": BandMF(num_bands=3)},  # built in, for comparison
}


def begun(name: str, seed: int | None = 0, **options: Any) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    """Starts a private run with the extension of a recipe."""
    torch.manual_seed(0)
    middle = recipe("Scale")(8) if name == "Scale" else nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), middle, nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 20, generator=generator)
    loader = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=12)
    engine = PrivacyEngine(seed=seed, **({"accountant": recipe("FewOrders")()} if name == "FewOrders" else {}))
    if "noise_multiplier" not in options:
        options = {"target_epsilon": 3.0} | options
    options = {"target_delta": 1e-3, "steps": STEPS} | OPTIONS[name]() | options
    return engine, *engine.make_private(model, optimizer, loader, **options)


def train(model: nn.Module, optimizer: Any, loader: Any, steps: int) -> None:
    """Trains for some steps, in an ordinary loop."""
    taken = 0
    while taken < steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                return


def weights_after(name: str, steps: int = STEPS, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Returns the weights after some steps, and epsilon."""
    engine, model, optimizer, loader = begun(name, **options)
    train(model, optimizer, loader, steps)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}, engine.epsilon


def of_rank() -> list[tuple[dict[str, torch.Tensor], float]]:
    """Returns the result of each recipe on this rank."""
    warnings.simplefilter("ignore")
    return [weights_after(name) for name in NAMES]
