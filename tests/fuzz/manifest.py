"""A checkpoint's manifest (zero_c._checkpoint, zero_c._loading), which anybody may have written.

An input is a right manifest with something wrong in it and a right checksum, or bytes in its place.

    a load brings back what was saved, or raises CheckpointError, and then nothing has changed: no array, no option
"""

import json

from checkpoint import Saved
from choices import Choices
from zero_c import _checkpoint

SAVED = Saved()


def one_input(data):
    choices = Choices(data)
    what = choices.below(16)
    if what == 0:
        text = choices.bytes(200)
    elif what == 1:
        text = json.dumps(choices.edited(json.loads(SAVED.bytes[_checkpoint.MANIFEST]))).encode()
    else:
        text = _checkpoint.seal(choices.edited(SAVED.manifest))
        if what == 2:
            at = choices.below(len(text))
            text = text[:at] + choices.bytes(4) + text[at + choices.below(3):]
    SAVED.path.write_bytes(text)
    SAVED.load()
