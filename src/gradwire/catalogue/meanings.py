"""What the parameters of recipes mean, in a line each, as `gradwire recipes NAME` prints it."""

from __future__ import annotations

# By name; a name that means something else in some recipe is there a second time, with the recipe in front.
_MEANINGS = {
    "ahead": "the part of its unsent update that a worker keeps in its own parameters between exchanges",
    "bits": "the bits of a value that is sent: 2^bits levels",
    "homomorphic.bits": "the bits of an entry in the sum: 32, 16, 8 or 4; 8 hold the sum of up to 127 workers",
    "bucket": "entries that have levels of their own; 0: one bucket for each tensor",
    "buffers": "floating-point buffers are averaged at every so many exchanges, and at the last one",
    "chunk": "consecutive entries of which the k largest are sent",
    "classes": "on, or off: one scale for all rows and columns",
    "clip": "entries are clipped to so many standard deviations; 0 is off, and anything else is not unbiased",
    "clip_norm": "DDP: the largest norm of a worker's gradient, over √workers; 0 is off",
    "coder": "what codes the symbols: rans, huffman, raw, or auto where it may choose",
    "decay": "what was not sent is remembered, and multiplied by this in each exchange; 0 remembers nothing",
    "flush": "the share of entries sent once more, by stc, when the training ends",
    "form": "b: the two levels with the least error; pb: ±b, unbiased",
    "format": "fp4, fp8, e2m1, e4m3, e5m2, or any other of up to 8 bits such as e3m2b3",
    "k": "send so many entries of each tensor, in place of the share p; none: use p",
    "sparseloco.k": "entries that are sent of each chunk",
    "levels": "the number of levels",
    "m": "how much more an error counts at large entries: errors are weighted with |entry|^m",
    "mask": "on: momentum is accumulated before the exchange, and cleared where it was sent; DDP: name optimizer=",
    "model": "the model of the entropy coder: gennorm, histogram, or auto for what is shorter",
    "nmse": "the relative squared error of a frame: larger is fewer bytes",
    "ecq.nmse": "the relative squared error, in place of the rate: larger is fewer bytes; off: by the rate",
    "norm": "what the levels reach to: the largest magnitude (max) or the Euclidean norm (l2)",
    "outer_lr": "the learning rate of the Nesterov optimizer that takes the mean updates",
    "outer_momentum": "its momentum",
    "p": "the share of the entries that is sent",
    "positions": "how positions are coded: golomb, rans, or auto for what is shorter",
    "power": "a tensor of d entries sends in proportion to d^power: below 1, small tensors send more",
    "precision": "of the levels in the frame: fp32, bf16 or fp16",
    "rank": "the most terms that predict a matrix; 0: no prediction; auto: as many as pay",
    "rate": "bits an entry; auto is 2",
    "ratio": "how many times smaller than the tensor the sketch is",
    "rounding": "nearest, or stochastic, which is unbiased",
    "rounds": "exchanges of a message: 1 (a sketch), 2 (an index, then words), or auto, by its size",
    "rows": "hash functions of the sketch",
    "scope": "tensor, or model: the largest entries of all tensors together (LocalSGD only)",
    "search": "how levels are found: greedy as in the paper, polished, exact",
    "small": "the recipe of tensors below 4096 entries (norms, biases); same for none other",
    "start": "the share that is sent at the first step of the warm-up",
    "adam.start": "the relative squared error at the first step of the warm-up",
    "sync_every": "local steps between exchanges; more than 1 needs LocalSGD",
    "transform": "on, or off: no cosine transform of kernels",
    "units": "on: gradients are coded in units of Adam's steps, which needs optimizer=",
    "values": "of the values that are sent: fp32, fp16 or bf16",
    "warmup": "steps in which the share that is sent falls from start to p; 0 for none",
    "adam.warmup": "steps in which the error rises from start to nmse; 0 for none",
    "warmup_sync": "local steps between exchanges during the warm-up",
}


def meaning(recipe: str, parameter: str) -> str:
    """Return what a parameter of a recipe means."""
    return _MEANINGS.get(f"{recipe}.{parameter}") or _MEANINGS[parameter]
