"""All that gradwire knows of torch's insides: names that torch does not document, and may change in any release.

Nothing else in gradwire touches them, which a test checks, and other tests say what broke, for each of them. A function
here says what it relies on, in which versions of torch that was seen to hold, and what happens once it does not.

- `process_groups`: the store, names and timeouts of process groups;
- `autograd`: the backward pass that is under way;
- `tensors`: their memory, writes in place, many tensors at once, containers of tensors;
- `modules`: what is inside of wrappers, and what modules are told;
- `fully_shard`: FSDP2;
- `streams`: CUDA streams;
- `versions`: which versions were tried, and the error that names them.
"""
