"""The few operations that everything is made of, chosen by the device of their tensors.

Callers write `kernels.absmax(tensor)` and say nothing of devices. `reference/` defines every kernel in plain torch and
numpy; `cpu/` has the same ones in native code, and `cuda/` in Triton, with the same results bit for bit. Each has one
file for a family of kernels, of the same name:

    quantize      error feedback, samples, statistics, small float formats (co3, fp16, none)
    grid          evenly spaced grids with outliers (ecq)
    levels        a few levels in each bucket: searches and rounding (orq, bingrad, qsgd, terngrad, signsgd, …)
    sparse        selection of the largest entries (topk, sbc, stc, dgc, m22)
    sketch        count-sketches
    homomorphic   words on a grid, index, sketch, peeling
    structure     transforms of kernels, predictions of low rank, classes of entries (structured)
    streams       many streams of symbols coded at once (structured)
    rows          rows of a batch that make a weight gradient (gradwire.backward)
    coders        symbols to bytes: rANS, Huffman, packed bits; the checksum
    positions     positions to bytes: Golomb codes, classes of gaps

Coders, streams and positions take arrays in the host's memory; the others take tensors, which stay where they are if
their device has kernels of the family.

A kernel for another device, such as ORQ's `search_levels` on a GPU, is one file and one line:

1. write `cuda/levels.py` with a function of the reference's name and parameters, `search_levels`; `conditions.where`
   says which tensors it is for;
2. add `("cuda", "levels"): "gradwire.kernels.cuda.levels"` to `IMPLEMENTATIONS` in dispatch.py.

From then on gradients of all recipes of that family stay on the GPU, in single calls and in trainings. Whatever the new
file does not define is done there by the reference, in plain torch: a family is worth its line when its slow kernels
are written.

Where the native module is missing, the reference does all the work, with one warning and the same bytes.
"""

from __future__ import annotations

from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import *  # noqa: F403
from gradwire.kernels.reference import *  # noqa: F403

dispatch.bind(globals())  # from here on, `kernels.absmax` looks where its tensor is
