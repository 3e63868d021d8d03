"""The training engine: a run file in, weights, checkpoints and metrics out. It knows nothing of forecasts."""
