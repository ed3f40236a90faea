"""The arithmetic of the package in plain NumPy, slow and obvious: the truth, bit for bit.

Nothing here imports the package.  Each function states its formula; every
operation in it is one NumPy operation and so rounded once, in the order
written.  A test that compares with this file compares bytes (`same_bits`).

Parameters are named by dtype: "float32", "float64", "bfloat16", "float16".
NumPy has no bfloat16; such arrays are uint16 arrays of its bits here.
Only which NaN an operation gives is left open; `same_bits` treats all NaN of a
type as equal.
"""

import numpy as np

BLOCK = 64
NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64", np.dtype(np.float16): "float16",
         np.dtype(np.uint16): "bfloat16"}


# ---- types ------------------------------------------------------------------


def sum_type(dtype):
    """The type in which gradients of `dtype` are summed and states are kept."""
    return np.float64 if dtype == "float64" else np.float32


def bf16_to_f32(bits):
    """bfloat16 bits are the upper half of the fp32 bits."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values):
    """To nearest, ties to even: add 0x7fff plus the last kept bit, drop 16 bits; NaN stays NaN, made quiet."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(values), bits | np.uint32(0x400000), rounded) >> np.uint32(16)).astype(np.uint16)


def master_split(master):
    """An fp32 master as (bfloat16 bits, int16 remainder).

    half = (bits + 0x8000) >> 16, remainder = bits - (half << 16).

    The bfloat16 is the master rounded to nearest, ties away from zero.  A NaN becomes 0x7fc00000 first.
    """
    master = np.ascontiguousarray(master, np.float32)
    bits = np.where(np.isnan(master), np.uint32(0x7FC00000), master.view(np.uint32))
    half = (bits + np.uint32(0x8000)) >> np.uint32(16)
    return half.astype(np.uint16), (bits - (half << np.uint32(16))).astype(np.uint16).view(np.int16)


def master_join(half, remainder):
    """master bits = (half << 16) + remainder."""
    upper = np.asarray(half, np.uint16).astype(np.uint32) << np.uint32(16)
    return (upper + np.asarray(remainder, np.int16).astype(np.int32).view(np.uint32)).view(np.float32)


def to_sum_type(values, dtype):
    """The exact value of an array in its sum type."""
    if dtype == "bfloat16":
        return bf16_to_f32(values)
    return np.asarray(values).astype(sum_type(dtype))


def same_bits(a, b):
    """Equal bytes, where all NaN of a type are the same."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_uint = f"u{a.dtype.itemsize}"
    equal = a.reshape(-1).view(as_uint) == b.reshape(-1).view(as_uint)
    if a.dtype.kind == "f":
        equal |= (np.isnan(a) & np.isnan(b)).reshape(-1)
    return bool(equal.all())


# ---- sums -------------------------------------------------------------------


@np.errstate(all="ignore")
def reduce_ranks(gradients, dtype, shape):
    """((g[0] + g[1]) + g[2]) + ... in the sum type, in rank order; None stands for zeros (+0)."""
    gradients = [np.zeros(shape, sum_type(dtype)) if g is None else to_sum_type(g, dtype) for g in gradients]
    total = gradients[0].copy()
    for gradient in gradients[1:]:
        total = total + gradient
    return total


@np.errstate(all="ignore")
def block_sums(values):
    """Sums of squares of blocks of 64 elements, in fp64.

    Lane j of 8 adds the squares of elements j, j+8, ... of the block in turn; the lanes are added
    ((0+4)+(2+6)) + ((1+5)+(3+7)).  The last block is padded with zeros.
    """
    flat = np.asarray(values).reshape(-1).astype(np.float64)
    flat = np.concatenate([flat, np.zeros(-len(flat) % BLOCK)]).reshape(-1, 8, 8)
    lanes = np.zeros((len(flat), 8))
    for k in range(8):
        lanes = lanes + flat[:, k] * flat[:, k]
    return ((lanes[:, 0] + lanes[:, 4]) + (lanes[:, 2] + lanes[:, 6])) + (
        (lanes[:, 1] + lanes[:, 5]) + (lanes[:, 3] + lanes[:, 7]))


def exact_sum(numbers):
    """The sum of non-negative doubles, rounded once to nearest even: integers in units of 2**-1074."""
    total = 0
    for number in numbers:
        numerator, denominator = float(number).as_integer_ratio()
        total += numerator * ((1 << 1074) // denominator)
    try:
        return total / (1 << 1074)
    except OverflowError:
        return float("inf")


@np.errstate(all="ignore")
def raw_norm(arrays):
    """sqrt of the exact sum of all block sums; NaN if an element is one, else inf if one is infinite."""
    sums = []
    infinite = False
    for array in arrays:
        if np.isnan(array).any():
            return float("nan")
        blocks = block_sums(array)
        infinite |= bool(np.isinf(array).any() or np.isinf(blocks).any())
        sums.extend(blocks)
    return float("inf") if infinite else float(np.sqrt(exact_sum(sums)))


def clip_coefficient(max_norm, norm):
    """min(1, max_norm / (norm + 1e-6)); a NaN norm gives NaN."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1 else coefficient


# ---- scalars of a step -------------------------------------------------------


def powi(base, exponent):
    """base**exponent in double by repeated squaring, low bit first."""
    power = 1.0
    while exponent:
        if exponent & 1:
            power = power * base
        base = base * base
        exponent >>= 1
    return power


def scalars(rule, options, step, grad_factor, real):
    """All scalars of one parameter's update, computed in double, each rounded once to `real`.

    adam, adamw: step_size = lr / (1 - beta1**t), inv_bias2 = 1 / sqrt(1 - beta2**t), beta1c = 1 - beta1,
                 beta2c = 1 - beta2, decay = 1 - lr * weight_decay (adamw) or weight_decay (adam)
    sgd:         step_size = lr, beta1 = momentum, beta1c = 1 - dampening, decay = weight_decay
    """
    s = {"grad_factor": -grad_factor if options["maximize"] else grad_factor}
    lr, weight_decay = float(options["lr"]), float(options["weight_decay"])
    if rule == "sgd":
        s.update(step_size=lr, beta1=options["momentum"], beta1c=1.0 - options["dampening"], decay=weight_decay)
        has_decay = weight_decay != 0
    else:
        beta1, beta2 = options["betas"]
        s.update(step_size=lr / (1.0 - powi(beta1, step)),
                 inv_bias2=1.0 / float(np.sqrt(1.0 - powi(beta2, step))),
                 beta1=beta1, beta1c=1.0 - beta1, beta2=beta2, beta2c=1.0 - beta2, eps=options["eps"])
        s["decay"] = 1.0 - lr * weight_decay if rule == "adamw" else weight_decay
        has_decay = s["decay"] != (1.0 if rule == "adamw" else 0.0)
    s = {name: real(value) for name, value in s.items()}
    s["has_decay"] = has_decay
    return s


# ---- updates -----------------------------------------------------------------


def update_adam(rule, s, p, total, m, v, vmax):
    """One update; returns (p, m, v, vmax), vmax is None without amsgrad.

    g = grad_factor * total;  adam with decay: g = g + decay * p;  adamw with decay: p = p * decay
    m = m + (g - m) * beta1c;  v = v * beta2 + (beta2c * g) * g;  amsgrad: vmax = max(vmax, v), used for v below
    p = p - (step_size * m) / (sqrt(v) * inv_bias2 + eps)
    """
    g = s["grad_factor"] * total
    if s["has_decay"]:
        if rule == "adamw":
            p = p * s["decay"]
        else:
            g = g + s["decay"] * p
    m = m + (g - m) * s["beta1c"]
    v = v * s["beta2"] + (s["beta2c"] * g) * g
    root = v
    if vmax is not None:
        vmax = np.maximum(vmax, v)
        root = vmax
    p = p - (s["step_size"] * m) / (np.sqrt(root) * s["inv_bias2"] + s["eps"])
    return p, m, v, vmax


def update_sgd(s, p, total, buffer, momentum, nesterov):
    """One update; returns (p, buffer). buffer None with momentum: this is its first use.

    g = grad_factor * total;  with decay: g = g + decay * p
    momentum: buffer = g the first time, then buffer * beta1 + beta1c * g
    nesterov: g = g + beta1 * buffer, otherwise g = buffer;  p = p - step_size * g
    """
    g = s["grad_factor"] * total
    if s["has_decay"]:
        g = g + s["decay"] * p
    if momentum:
        buffer = g if buffer is None else buffer * s["beta1"] + s["beta1c"] * g
        g = g + s["beta1"] * buffer if nesterov else buffer
    return p - s["step_size"] * g, buffer


# ---- whole steps ---------------------------------------------------------------

DEFAULTS = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False,
              "maximize": False},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
             "maximize": False},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
            "maximize": False},
}


class ReferenceOptimizer:
    """Training steps on plain arrays: what every rank of a sharded run must hold afterwards.

    params: arrays (uint16: bfloat16 bits); copied.  groups: dicts with "params" (indices into params) and
    options, default one group of all.  After a step `params`, `state` (per parameter: "step", and "exp_avg",
    "exp_avg_sq", "max_exp_avg_sq" or "momentum_buffer"), `masters` (exact values), `norm` and `skipped` can be
    read, and `nonfinite`: 1 if any gradient was, where an engine counts the ranks that saw one in their shard.
    """

    def __init__(self, params, ranks, optimizer="adamw", groups=None, max_grad_norm=None, loss_scale=1.0,
                 skip_nonfinite=False, reduce_op="mean", **options):
        self.rule = optimizer
        self.ranks = ranks
        self.dtypes = [NAMES[np.asarray(p).dtype] for p in params]
        self.params = [np.array(p) for p in params]
        self.groups = [{**DEFAULTS[optimizer], **options, **group}
                       for group in groups or [{"params": list(range(len(params)))}]]
        self.max_grad_norm = max_grad_norm
        self.loss_scale = loss_scale
        self.skip_nonfinite = skip_nonfinite
        self.reduce_op = reduce_op
        self.masters = [to_sum_type(p, dtype) for p, dtype in zip(self.params, self.dtypes)]
        self.state = [{"step": 0} for _ in params]
        self.norm = float("nan")
        self.skipped = False
        self.nonfinite = 0
        self._clip = 1.0
        self._sums = None
        self._used = set()

    # gradients

    @np.errstate(all="ignore")
    def accumulate(self, gradients):
        """One synchronised round: gradients[rank][parameter] is an array or None. Rounds are added in order."""
        assert len(gradients) == self.ranks
        fresh = []
        for i, (param, dtype) in enumerate(zip(self.params, self.dtypes)):
            of_ranks = [rank[i] for rank in gradients]
            if any(g is not None for g in of_ranks):
                self._used.add(i)
            fresh.append(reduce_ranks(of_ranks, dtype, param.shape))
        self._sums = fresh if self._sums is None else [old + new for old, new in zip(self._sums, fresh)]

    def base_factor(self):
        """1/N for the mean, divided by the loss scale."""
        return (1.0 / self.ranks if self.reduce_op == "mean" else 1.0) / self.loss_scale

    def grad_norm(self):
        """(base factor * earlier clipping) * the norm of the sums."""
        return (self.base_factor() * self._clip) * raw_norm(self._sums or [])

    def clip_grad_norm(self, max_norm):
        """clip_grad_norm_ before the step: returns the norm; the coefficient is applied in the update."""
        norm = self.grad_norm()
        if not np.isinf(max_norm):
            self._clip = self._clip * clip_coefficient(max_norm, norm)
        return norm

    def averaged(self, i):
        """The averaged gradient of parameter i as the user sees it: factor (in the sum type) * sum."""
        real = sum_type(self.dtypes[i])
        return real(self.base_factor() * self._clip) * self._sums[i]

    # the step

    def step(self, rounds=()):
        """accumulate() every round, then update: factor = base * earlier clip * clip coefficient."""
        for gradients in rounds:
            self.accumulate(gradients)
        sums = self._sums or [reduce_ranks([None], d, p.shape) for p, d in zip(self.params, self.dtypes)]
        factor = self.base_factor() * self._clip
        raw = raw_norm(sums)
        self.norm = factor * raw
        self.nonfinite = int(not np.isfinite(raw))
        self.skipped = bool(self.skip_nonfinite and self.nonfinite)
        if self.max_grad_norm:
            factor = factor * clip_coefficient(self.max_grad_norm, self.norm)
        if not self.skipped:
            with np.errstate(all="ignore"):
                for group in self.groups:
                    for i in group["params"]:
                        if i in self._used:
                            self._update(i, group, sums[i], factor)
        self._sums, self._used, self._clip = None, set(), 1.0

    def _update(self, i, group, total, factor):
        real = sum_type(self.dtypes[i])
        state = self.state[i]
        state["step"] += 1
        s = scalars(self.rule, group, state["step"], factor, real)
        p = self.masters[i]
        if self.rule == "sgd":
            momentum = group["momentum"] != 0
            p, buffer = update_sgd(s, p, total, state.get("momentum_buffer"), momentum, group["nesterov"])
            if momentum:
                state["momentum_buffer"] = buffer
        else:
            zeros = np.zeros(p.shape, real)
            vmax = state.get("max_exp_avg_sq", zeros) if group["amsgrad"] else None
            p, m, v, vmax = update_adam(self.rule, s, p, total, state.get("exp_avg", zeros),
                                        state.get("exp_avg_sq", zeros), vmax)
            state.update(exp_avg=m, exp_avg_sq=v)
            if vmax is not None:
                state["max_exp_avg_sq"] = vmax
        self._store(i, p)

    def _store(self, i, p):
        """Writes an exact value back: bf16 keeps its bits and the remainder, fp16 an fp32 master beside it."""
        dtype = self.dtypes[i]
        self.masters[i] = p
        if dtype == "bfloat16":
            half, remainder = master_split(p)
            self.params[i] = half
            self.masters[i] = master_join(half, remainder)
        elif dtype == "float16":
            self.params[i] = p.astype(np.float16)
        else:
            self.params[i] = p.copy()
