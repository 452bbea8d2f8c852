"""The proof that N towers train what one trains, on a run's own network, before it trains."""
