"""The Trainer of Hugging Face transformers with sharded training state: clipping, accumulation, evaluation, checkpoints and
training that goes on from one. Random weights and made-up tokens: nothing is downloaded.

    python -m zero_c.launch -n 2 --no-torch-env examples/hf_trainer.py --stage 2 --folder run
    python -m zero_c.launch -n 2 examples/hf_trainer.py --ddp --folder run        # Trainer's own DDP, to compare with
"""
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import zero_c
from zero_c.torch import ShardedOptimizer

from packages import made_up_tokens, report
from side_by_side import arguments

VOCABULARY = 96
BATCH, ACCUMULATED = 4, 2


class ShardedTrainer(Trainer):
    """A Trainer with a ShardedOptimizer as optimizers=(opt, schedule)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sharded = opt = self.optimizer  # Trainer puts a wrapper in its place
        # Gradients are in the engine, so that is who clips them and knows their norm; max_grad_norm is TrainingArguments'.
        self.accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2: opt.clip_grad_norm_(max_norm, norm_type)

    # At stage 3 the weights are whole in here only. Both are called on all ranks.

    def save_model(self, *args, **kwargs):
        with self.sharded.gathered():
            super().save_model(*args, **kwargs)

    def _load_from_checkpoint(self, *args, **kwargs):
        with self.sharded.gathered(write=True):
            super()._load_from_checkpoint(*args, **kwargs)


def build():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def tokens_of(start, stop, step=1):
    tokens = made_up_tokens(stop, VOCABULARY)[start::step]
    return [{"input_ids": row, "labels": row} for row in tokens]


def settings(args, folder):
    return TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED, max_grad_norm=0.5, train_sampling_strategy="sequential",
        logging_steps=1, logging_nan_inf_filter=False, eval_strategy="steps", eval_steps=args.steps, save_strategy="steps",
        save_steps=args.steps // 2, report_to=[], disable_tqdm=True, dataloader_pin_memory=False)


def main(argv=None):
    args = arguments(__doc__, steps=6, argv=argv, folder="for checkpoints", resume="go on from this step's checkpoint")
    comm = zero_c.init()
    model = build()
    count = args.steps * BATCH * ACCUMULATED * comm.world_size
    evaluated = tokens_of(0, 8)
    if args.ddp:
        kind, folder, data = Trainer, args.folder, tokens_of(0, count)
        opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    else:
        # Trainer knows one process: it gets this rank's data, and a folder of its own for this rank's shards.
        kind, folder, data = ShardedTrainer, os.path.join(args.folder, f"rank{comm.rank}"), tokens_of(
            comm.rank, count, comm.world_size)
        opt = ShardedOptimizer(model, lr=2e-3, stage=args.stage)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=args.steps)
    trainer = kind(model, settings(args, folder), train_dataset=data, eval_dataset=evaluated, optimizers=(opt, schedule))
    trainer.train(resume_from_checkpoint=os.path.join(folder, f"checkpoint-{args.resume}") if args.resume else None)

    logs = trainer.state.log_history
    return report(args, comm, [line["loss"] for line in logs if "loss" in line], {
        "norms": [line["grad_norm"] for line in logs if "grad_norm" in line],
        "eval_loss": [line["eval_loss"] for line in logs if "eval_loss" in line]})


if __name__ == "__main__":
    main()
