from typing import Literal

from zero_c._core import Communicator

def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    address: str | None = None,
    job: str | None = None,
    backend: Literal["auto", "shm", "tcp", "nccl"] = "auto",
    start_timeout: float = 60.0,
    timeout: float = 1800.0,
) -> Communicator: ...
def local_group(ranks: int, timeout: float = 1800.0) -> list[Communicator]: ...
def close_default() -> None: ...
