"""Other optimizers must not step what a ShardedOptimizer trains.

Their step would read the NaN that `.grad` shows and write it into the parameters, or, at
stage 3, into what stands for them. torch calls a hook before the step of any optimizer, so
this is found before anything is written, and costs the steps of a ShardedOptimizer nothing.
"""

import weakref

from torch.optim.optimizer import register_optimizer_step_pre_hook

import zero_c

owners = weakref.WeakSet()  # all ShardedOptimizers
_watching = []  # the handle of refuse_step, once there is an owner


def watch(owner):
    """From now on other optimizers are refused its parameters."""
    owners.add(owner)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(refuse_step))


def refuse_step(optimizer, arguments, keywords):
    """Before the step of any torch optimizer."""
    if optimizer in owners:
        return  # construction refuses parameters that another one has
    for owner in list(owners):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owner._has(parameter):
                    raise zero_c.Error(f"rank {owner._comm.rank}: {type(optimizer).__name__}.step() for parameter "
                                       f"'{owner._name_of(parameter)}', whose gradient, and at stage 3 whose values, a "
                                       f"ShardedOptimizer has; give its group to that one, or write values inside "
                                       f"opt.gathered(write=True)")
