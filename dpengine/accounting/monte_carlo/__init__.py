"""Monte Carlo accounting for sampled matrix mechanisms."""
