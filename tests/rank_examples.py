"""What ranks do in test_examples_hf.py: they run the scripts of examples/ that use other packages, one after the other."""

import importlib
import os
import sys
from pathlib import Path

import torch

import zero_c
from zero_c.torch import ShardedOptimizer

ENVIRONMENT = dict(os.environ)  # accelerate and Lightning write theirs
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


def run(script, arguments):
    """main() of a script, as in a process of its own: what earlier scripts left to the process is taken away."""
    forget()
    return importlib.import_module(script).main(arguments)


def forget():
    # Not torch's process group: one that is freed now and then waits, holding the GIL, for its thread that wants it.
    from accelerate.state import AcceleratorState

    zero_c._init.close_default()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)


def saved_classifier(folder):
    """The parameters that from_pretrained() finds, in one row."""
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trainer_alone(stage, max_grad_norm, folder):
    """The error of a Trainer that clips, or asks for the norm, with torch's function."""
    import hf_trainer
    from transformers import Trainer, TrainingArguments

    forget()
    model = hf_trainer.build()
    zero_c.init()
    opt = ShardedOptimizer(model, stage=stage)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    before = opt.full_param(model.transformer.wte.weight)
    trainer = Trainer(model, TrainingArguments(os.path.join(folder, str(zero_c.init().rank)), use_cpu=True, max_steps=1,
                                               max_grad_norm=max_grad_norm, report_to=[], disable_tqdm=True),
                      train_dataset=hf_trainer.tokens_of(0, 8), optimizers=(opt, schedule))
    try:
        trainer.train()
    except RuntimeError as error:
        unchanged = torch.equal(before, opt.full_param(model.transformer.wte.weight))
        return f"{type(error).__name__}: {error}", unchanged
    return "none", False
