"""Steps of JAX contenders, for ``jax_process``: reads a request per line from standard input, and answers with a line.

Imports JAX and not torch, so it may run with another interpreter. The models are those of ``models.py``, with the same
names and shapes of parameters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Parameters = dict[str, Any]


def _models() -> dict[str, Callable[[Parameters, Any], Any]]:
    import jax
    import jax.numpy as jnp

    def linear(p: Parameters, name: str, x: Any) -> Any:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def mlp(p: Parameters, x: Any) -> Any:
        return linear(p, "4", jax.nn.relu(linear(p, "2", jax.nn.relu(linear(p, "0", x)))))

    def conv(p: Parameters, name: str, x: Any, stride: int, pad: int) -> Any:
        out = jax.lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), [(pad, pad)] * 2)
        return out + p[f"{name}.bias"][None, :, None, None]

    def pool(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")

    def cnn(p: Parameters, x: Any) -> Any:
        x = pool(jnp.tanh(conv(p, "0", x, 2, 3)))
        x = pool(jnp.tanh(conv(p, "3", x, 2, 0)))
        return linear(p, "9", jnp.tanh(linear(p, "7", x.reshape(x.shape[0], -1))))

    def norm(p: Parameters, name: str, x: Any) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + 1e-5)
        return centred * scale * p[f"{name}.weight"] + p[f"{name}.bias"]

    def layer(p: Parameters, name: str, x: Any) -> Any:
        batch_size, time_, width = x.shape
        q, k, v = jnp.moveaxis(
            linear(p, f"{name}.qkv", norm(p, f"{name}.norm1", x)).reshape(batch_size, time_, 3, 4, -1), 2, 0
        )
        x = x + linear(p, f"{name}.out", jax.nn.dot_product_attention(q, k, v).reshape(batch_size, time_, width))
        hidden = jax.nn.gelu(linear(p, f"{name}.up", norm(p, f"{name}.norm2", x)), approximate=False)
        return x + linear(p, f"{name}.down", hidden)

    def bert(p: Parameters, ids: Any) -> Any:
        x = p["words.weight"][ids] + p["positions.weight"][: ids.shape[1]]
        for number in range(4):
            x = layer(p, f"layers.{number}", x)
        return linear(p, "head", x.mean(axis=1))

    return {"mlp": mlp, "cnn": cnn, "bert": bert}


def _make_step(
    job: dict[str, Any], batch_size: int, size: int | None
) -> tuple[Callable[..., Any], Callable[[Parameters], Any]]:
    """Returns the jitted step ``(parameters, state, inputs, targets) -> (parameters, state)``, and its ``init``."""
    import jax
    import jax.numpy as jnp
    import optax

    model = _models()[job["model"]]

    def loss(p: Parameters, inputs: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(p, inputs), targets).mean()

    def update(p: Parameters, grads: Parameters) -> Parameters:
        return jax.tree.map(lambda w, g: w - job["rate"] * g, p, grads)

    if not job["private"]:

        def plain(p: Parameters, state: Any, inputs: Any, targets: Any) -> tuple[Parameters, Any]:
            return update(p, jax.grad(loss)(p, inputs, targets)), state

        return jax.jit(plain, donate_argnums=(0, 1)), lambda p: jnp.zeros(())

    from jax_privacy import clipped_grad
    from jax_privacy.noise_addition import gaussian_privatizer

    clipped = clipped_grad(
        loss, l2_clip_norm=job["max_norm"], batch_argnums=(1, 2), normalize_by=float(batch_size), microbatch_size=size
    )
    noise = gaussian_privatizer(stddev=job["sigma"] * job["max_norm"] / batch_size, prng_key=jax.random.key(0))

    def private(p: Parameters, state: Any, inputs: Any, targets: Any) -> tuple[Parameters, Any]:
        noisy, state = noise.update(clipped(p, inputs, targets), state)
        return update(p, noisy), state

    return jax.jit(private, donate_argnums=(0, 1)), noise.init


def _fastest(job: dict[str, Any], parameters: Parameters, data: list[Any]) -> tuple[Callable[..., Any], Any]:
    """Returns the compiled step with the fastest microbatch size, and its state."""
    import jax
    import jax.numpy as jnp

    found = []
    for size in job["sizes"]:
        step, init = _make_step(job, len(data[1]), size)
        state = init(parameters)
        compiled = step.lower(parameters, state, *data).compile()
        seconds = 0.0
        for _ in range(2 if len(job["sizes"]) > 1 else 0):  # the first run warms up; inputs are donated, hence copies
            copies = jax.block_until_ready(jax.tree.map(jnp.copy, (parameters, state)))
            start = time.perf_counter()
            jax.block_until_ready(compiled(*copies, *data))
            seconds = time.perf_counter() - start
        found.append((seconds, compiled, state))
    return min(found, key=lambda entry: entry[0])[1:]


def main() -> None:
    """Answers requests until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # so that output of libraries is not taken for an answer
    job = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])  # XLA counts the cores it may use
    import jax
    import jax.numpy as jnp

    with np.load(job["arrays"]) as arrays:
        data = [jnp.asarray(arrays[name]) for name in ("inputs", "targets")]
        parameters = {name[2:]: jnp.asarray(arrays[name]) for name in arrays.files if name.startswith("p:")}
    compiled, state = _fastest(job, parameters, data)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "save" in request:
            np.savez(request["save"], **{name: np.asarray(value) for name, value in parameters.items()})
            print("{}", file=answers, flush=True)
            continue
        start = time.perf_counter()
        parameters, state = compiled(parameters, state, *data)
        jax.block_until_ready((parameters, state))
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
