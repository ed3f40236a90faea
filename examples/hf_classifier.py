"""Fine-tunes a small BERT classifier of Hugging Face transformers in an own loop: dropout, groups with and without weight
decay, the schedule with warmup, a model saved for from_pretrained(). Random weights and made-up data: nothing is downloaded.

    python -m zero_c.launch -n 2 examples/hf_classifier.py --stage 2
    python -m zero_c.launch -n 2 examples/hf_classifier.py --ddp                      # DDP and torch's AdamW, to compare with
"""
import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import zero_c
from zero_c.torch import ShardedOptimizer

from packages import made_up_tokens, report
from side_by_side import arguments

VOCABULARY = 64


def build():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=3))


def groups(model):
    """As usual for BERT: no weight decay for biases and norms."""
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
    known = {id(p) for p in plain}
    return [{"params": [p for p in model.parameters() if id(p) not in known], "weight_decay": 0.01},
            {"params": plain, "weight_decay": 0.0}]


def main(argv=None):
    args = arguments(__doc__, steps=6, argv=argv, save="folder for the trained model")
    comm = zero_c.init()
    model = build()
    torch.manual_seed(1 + comm.rank)  # every rank drops out for itself
    tokens = made_up_tokens(args.steps * comm.world_size * 8, VOCABULARY)
    data = torch.utils.data.TensorDataset(tokens, (tokens[:, 1] - tokens[:, 0]) % VOCABULARY - 1)
    # Needs no process group when it is told the ranks.
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=comm.world_size, rank=comm.rank, seed=3)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)

    if args.ddp:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        opt = torch.optim.AdamW(groups(model), lr=1e-3)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
    else:
        opt = ShardedOptimizer(groups(model), module=model, lr=1e-3, stage=args.stage)
        parallel = model
    schedule = get_linear_schedule_with_warmup(opt, num_warmup_steps=2, num_training_steps=args.steps)

    losses = []
    for ids, labels in loader:
        loss = parallel(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
        losses.append(loss.item())
    if args.save and not args.ddp:
        state = opt.full_model_state_dict(rank=0)  # whole at every stage, on rank 0
        if comm.rank == 0:
            model.save_pretrained(args.save, state_dict=state)
    return report(args, comm, losses)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
