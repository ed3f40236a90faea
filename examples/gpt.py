"""A byte-level GPT in plain PyTorch and the text it reads: the source of the installed Python library."""
import pathlib
import sysconfig

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the loss when targets are given."""

    def __init__(self, layers=8, width=192, heads=8, context=64, vocabulary=256):
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.5)

    def forward(self, ids, targets=None):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def write(self, start, length, temperature=0.7, seed=0):
        """`length` more bytes after `start`, as text."""
        dice = torch.Generator().manual_seed(seed)
        ids = torch.tensor([list(start.encode())])
        for _ in range(length):
            logits = self(ids[:, -self.context:])[0, -1]
            ids = torch.cat([ids, torch.multinomial(F.softmax(logits / temperature, 0), 1, generator=dice)[None]], 1)
        return bytes(ids[0].tolist()).decode(errors="replace")


class LibrarySource:
    """Random windows from this rank's share of the library's files: file i belongs to rank i modulo ranks."""

    def __init__(self, rank, ranks, context=64, batch=8):
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        files = sorted(f for f in root.rglob("*.py") if not skip.intersection(f.relative_to(root).parts))
        text = b"".join(f.read_bytes() for f in files[rank::ranks])
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.dice = torch.Generator().manual_seed(1000 + rank)
        self.context, self.batch = context, batch

    def next(self):
        starts = torch.randint(len(self.bytes) - self.context, (self.batch, 1), generator=self.dice)
        windows = self.bytes[starts + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
