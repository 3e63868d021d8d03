"""Readers and writers of what others write: config.json of Hugging Face, arguments of Megatron-LM."""
