"""Inference: prefill and decoding of a served model, and its KV cache."""
