"""One rank of gpu_check's check "ranks": gpu_check_rank.py DEVICE. Rank 0 says what was found."""
import sys

import torch
import zero_c
from gpu_check_train import compare_all

TIMEOUT_S = 60

with zero_c.init(start_timeout=TIMEOUT_S, timeout=TIMEOUT_S) as comm:
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    found = compare_all(device)
    if comm.rank == 0:
        print(f"rank 0: {found}", flush=True)
