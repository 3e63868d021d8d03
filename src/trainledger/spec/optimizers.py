"""Which optimizers there are and how each may run."""

from __future__ import annotations

# How each may run, the default first: one kernel for everything (fused), a kernel per line of the rule over lists
# of tensors (foreach), or tensor by tensor (loop). Torch has no fused RMSProp and no fused Adafactor, whose default
# there is the loop; Lion and 8-bit Adam are the engine's own. Muon goes tensor by tensor in any case: what is said
# here is how its AdamW for the rest runs.
IMPLEMENTATIONS = {
    "adamw": ("fused", "foreach", "loop"),
    "adam": ("fused", "foreach", "loop"),
    "sgd": ("fused", "foreach", "loop"),
    "momentum": ("fused", "foreach", "loop"),
    "nesterov": ("fused", "foreach", "loop"),
    "adagrad": ("fused", "foreach", "loop"),
    "rmsprop": ("foreach", "loop"),
    "adafactor": ("loop", "foreach"),
    "lion": ("foreach", "loop"),
    "muon": ("fused", "foreach", "loop"),
    "adamw-8bit": ("loop", "fused"),
    "adam-8bit": ("loop", "fused"),
}
# Accounted for as bitsandbytes runs it, whose kernel this engine does not have.
ACCOUNTED_ONLY = (("adamw-8bit", "fused"), ("adam-8bit", "fused"))
OPTIMIZERS = tuple(IMPLEMENTATIONS)
OPTIMIZER_LOOPS = ("fused", "foreach", "loop")
