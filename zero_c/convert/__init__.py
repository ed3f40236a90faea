"""Checkpoints of other packages become checkpoints of zero_c, without ranks, an engine, or the other package.

    python -m zero_c.convert deepspeed SOURCE DEST      ZeRO stages 1, 2 and 3
    python -m zero_c.convert dcp SOURCE DEST            FSDP2, through torch.distributed.checkpoint

A converter makes a Source (_source.py): what tensors the model has, and a way to
read any part of each. _saving.py writes it, as it writes an engine's, so that there
is one writer of the format and values pass through in blocks of 1 MiB.

The foreign formats are pickles. They are read by torch.load(weights_only=True) with
a list of what may be in them (_allowed.py), never by the pickle module.

This package needs torch, which the rest of zero_c does not import.
"""
