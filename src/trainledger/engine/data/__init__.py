"""From text to batches: corpora, tokenizers, the token store, and which tokens a step trains on.

`loader` brings the batches to a device and is the only module here that imports torch.
"""
