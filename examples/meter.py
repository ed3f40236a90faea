"""What a training script can tell about itself: loss, speed, memory as the operating system counts it, and a digest
of the final bits. Prints for people, or writes JSON lines that demo.py reads."""
import contextlib
import ctypes
import hashlib
import json
import platform
import time

import torch

from gpt import GPT


def held_bytes():
    """Memory of this process by Pss, each shared page divided by the number of its users; without pages that are
    only a cache of files (program text), which come and go with other processes."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)    # pages that malloc keeps of activations long freed
    kib = {}
    with open("/proc/self/smaps_rollup") as rollup:
        for word in map(str.split, rollup):
            if word[-1] == "kB":
                kib[word[0]] = int(word[1])
    return 1024 * (kib["Pss_Anon:"] + kib["Pss_Shmem:"] if "Pss_Anon:" in kib else kib["Pss:"])


class Meter:
    def __init__(self, log, rank):
        self.file = open(f"{log}.{rank}.jsonl", "w", buffering=1) if log else None
        self.rank, self.steps = rank, 0
        if self.file:
            model, ids = GPT(), torch.zeros(8, 64, dtype=torch.long)
            model(ids, ids).backward()      # what libraries load at first use is not the training's
            torch.optim.SGD(model.parameters(), lr=0).step()
            del model
            self.base = held_bytes()
        self.begin = time.perf_counter()

    def write(self, **record):
        if self.file:
            self.file.write(json.dumps(record) + "\n")

    def step(self, loss, tokens):
        self.steps += 1
        seconds = time.perf_counter() - self.begin
        if self.file:
            held = held_bytes() - self.base if self.steps % 10 == 1 else None
            self.write(step=self.steps, loss=float(loss).hex(), tokens=tokens, seconds=seconds, held=held)
        elif self.rank == 0 and self.steps % 10 == 0:
            print(f"step {self.steps}  loss {loss:.3f}  {seconds / self.steps:.3f} s a step", flush=True)

    def finish(self, model, whole=contextlib.nullcontext, **figures):
        """After the last step. Inside whole() all parameters are there; figures: what the optimizer counted."""
        if self.file:
            held = held_bytes() - self.base     # before whole() puts the model together
            bits = hashlib.sha256()
            with whole():
                for p in model.parameters():
                    bits.update(p.detach().numpy().tobytes())
            self.write(held=held, parameters=sum(p.numel() for p in model.parameters()), digest=bits.hexdigest(),
                       **figures)

    def sample(self, text):
        if self.file:
            self.write(sample=text)
        else:
            print(text)
