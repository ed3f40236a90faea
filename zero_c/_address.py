"""Where rank 0 of a job on several hosts listens, from an argument or from whoever started the ranks."""

import ipaddress
import re

SLURM_PORTS = 20000, 10000  # first, and how many: below the ports that systems give to outgoing connections


class Address:
    """A host's name or number, and a port."""

    def __init__(self, host, port):
        self.host, self.port = host, port

    def __str__(self):
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_address(given, environ):
    """As given, else what the environment says."""
    if given is not None:
        return parse_address(given, "address")
    if "ZERO_C_ADDR" in environ:
        return parse_address(environ["ZERO_C_ADDR"], "ZERO_C_ADDR")
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        # The port itself is the launcher's or torch.distributed's.
        port = _port(environ["MASTER_PORT"], "MASTER_PORT", 65534) + 1
        return Address(_host(environ["MASTER_ADDR"], "MASTER_ADDR"), port)
    if "SLURM_STEP_ID" in environ:
        return _slurm_address(environ)
    raise ValueError("nothing tells where rank 0 of this job can be reached: set ZERO_C_ADDR=host:port on all ranks, to the "
                     "host of rank 0 and a free port there (or MASTER_ADDR and MASTER_PORT: the port above it is used), or "
                     "pass address=")


def parse_address(text, source):
    """The Address of "host:port" or "[IPv6]:port"; `source` is where it stood."""
    found = isinstance(text, str) and re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):([^:]*)", text)
    if not found:
        raise ValueError(f"{source} is {text!r}; it must be 'host:port', with an IPv6 address '[::1]:29500'")
    return Address(_host(found[1] or found[2], source), _port(found[3], source, 65535))


def _host(text, source):
    if not re.fullmatch(r"[\w.:%-]+", text, re.ASCII):
        raise ValueError(f"{source} names host {text!r}; legal are a host's name, or its IPv4 or IPv6 address")
    try:
        unspecified = ipaddress.ip_address(text).is_unspecified
    except ValueError:  # a name
        return text
    if unspecified:
        raise ValueError(f"{source} is {text}, which stands for every network of a host; give the address by which the other "
                         f"ranks reach rank 0")
    return text


def _port(text, source, highest):
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= highest:
        raise ValueError(f"{source} has port {text!r}; legal are 1 to {highest}")
    return int(text)


def _slurm_address(environ):
    """The step's first host, where rank 0 is, and a port that other steps on that host will hardly have."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    numbers = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    first = first_host(hosts)
    if first is None or not all(re.fullmatch("[0-9]+", number) for number in numbers):
        raise ValueError(f"no address for rank 0 can be made from srun's list of hosts {hosts!r}, job {numbers[0]!r} and step "
                         f"{numbers[1]!r}: set ZERO_C_ADDR=host:port to the host of rank 0 and a free port there")
    start, count = SLURM_PORTS
    return Address(first, start + (int(numbers[0]) + 101 * int(numbers[1])) % count)


def first_host(hosts):
    """The first of a list as Slurm writes it, such as "node[07-12,20],login1"; None: it is no such list."""
    found = re.match(r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", hosts, re.ASCII)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else None
