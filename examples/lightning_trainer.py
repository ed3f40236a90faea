"""Lightning's Trainer with sharded training state from configure_optimizers(): clipping, accumulation, validation, a schedule,
checkpoints and training that goes on from one. Made-up tokens: nothing is downloaded.

    python -m zero_c.launch -n 2 --no-torch-env examples/lightning_trainer.py --stage 2 --folder run
    python -m zero_c.launch -n 2 examples/lightning_trainer.py --ddp --folder run          # Lightning's DDP, to compare with
"""
import os

import lightning
import torch

import zero_c
from zero_c.torch import ShardedOptimizer

from packages import made_up_tokens, report
from side_by_side import arguments

VOCABULARY = 96
BATCH, ACCUMULATED, EPOCHS = 4, 2, 2


class Model(torch.nn.Module):
    """The next token from the two before it."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
            for _ in range(3))
        self.head = torch.nn.Linear(64, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = torch.cat([x[:, :-2], x[:, 1:-1]], dim=2)
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 2:].flatten())


class Training(lightning.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args, self.model = args, Model()
        self.losses, self.validated = [], []

    def training_step(self, batch, number):
        loss = self.model(batch[0])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        self.validated.append(self.model(batch[0]).item())

    def configure_optimizers(self):
        if self.args.ddp:
            opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        else:
            # Not of `self`: Lightning calls training_step() and not self(), and stage 3 gathers where a module is called.
            opt = ShardedOptimizer(self.model, lr=2e-3, stage=self.args.stage)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=self.args.steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        """Gradients are in the engine, so that is who clips them."""
        if self.args.ddp:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None:
            self.optimizers(use_pl_optimizer=False).clip_grad_norm_(gradient_clip_val)


class Checkpoints(lightning.Callback):
    """One after each epoch, made by all ranks together; at stage 3 the weights are whole in here only."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, training):
        if not training.args.ddp:
            with training.optimizers(use_pl_optimizer=False).gathered():
                trainer.save_checkpoint(os.path.join(self.folder, f"step-{trainer.global_step}.ckpt"))


def main(argv=None):
    args = arguments(__doc__, steps=6, argv=argv, folder="for checkpoints", resume="go on from this step's checkpoint")
    comm = zero_c.init()
    torch.manual_seed(0)
    training = Training(args)
    tokens = made_up_tokens(args.steps // EPOCHS * BATCH * ACCUMULATED * comm.world_size, VOCABULARY)
    data = torch.utils.data.TensorDataset(tokens)
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=comm.world_size, rank=comm.rank, shuffle=False)
    folder = os.path.join(args.folder, f"rank{comm.rank}")  # each rank saves its shards
    # With DDP Lightning is told of the ranks; otherwise of none but this.
    ranks = {"devices": comm.world_size, "strategy": "ddp"} if args.ddp else {"devices": 1, "strategy": "auto"}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATED, gradient_clip_val=0.5, logger=False,
        callbacks=[Checkpoints(folder)], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=folder, **ranks)
    trainer.fit(training, torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler),
                torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens[:8]), batch_size=8),
                ckpt_path=os.path.join(folder, f"step-{args.resume}.ckpt") if args.resume else None)
    return report(args, comm, training.losses, training.validated)


if __name__ == "__main__":
    main()
