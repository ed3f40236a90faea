"""Trains a small Llama of Hugging Face transformers in an own loop with accelerate: tied embeddings, gradient checkpointing,
bf16 autocast, two batches a step, generate() in the middle. Random weights and made-up tokens: nothing is downloaded.

    python -m zero_c.launch -n 2 --no-torch-env examples/hf_causal_lm.py --stage 2
    python -m zero_c.launch -n 2 examples/hf_causal_lm.py --ddp                      # DDP and torch's AdamW, to compare with
"""
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from transformers import LlamaConfig, LlamaForCausalLM

import zero_c
from zero_c.torch import ShardedOptimizer

from packages import made_up_tokens, report
from side_by_side import arguments

VOCABULARY = 128


def build():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=None,
        pad_token_id=0))
    model.activation_checkpointing_enable()
    return model


def main(argv=None):
    args = arguments(__doc__, steps=6, argv=argv)
    comm = zero_c.init()
    model = build()
    if args.ddp:
        opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    else:
        opt = ShardedOptimizer(model, lr=2e-3, stage=args.stage)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 4))
    loader = torch.utils.data.DataLoader(made_up_tokens(args.steps * 2 * comm.world_size * 4, VOCABULARY), batch_size=4)

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    if not args.ddp:
        # accelerate knows one process: it is told which batches are this rank's, and that the norm is the optimizer's matter.
        loader = prepare_data_loader(loader, num_processes=comm.world_size, process_index=comm.rank)
        accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2: opt.clip_grad_norm_(max_norm, norm_type)
    model, optimizer, loader = accelerator.prepare(model, opt, loader)

    losses, norms, written = [], [], None
    for batch, tokens in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if batch == args.steps and comm.rank == 0:  # in the middle, and on one rank alone
            written = write(accelerator.unwrap_model(model), tokens[:1, :4])
    return report(args, comm, losses, {"norms": norms, "written": written})


def write(model, prompt):
    model.eval()
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    model.train()
    return ids[0].tolist()


if __name__ == "__main__":
    main()
