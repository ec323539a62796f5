"""The decoder in shards, two processes on a CPU: the same weights, logits and gradients as whole."""

import pytest
import torch
import torch.distributed as dist
from harness import processes
from torch.distributed.fsdp import fully_shard

from lightning_tricks.models import GPT2, Decoder, Llama
from lightning_tricks.optim import MuP, build_optimizer

pytestmark = pytest.mark.long

SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}
CONFIGS = [(GPT2(**SHAPE), None), (Llama(**SHAPE, n_kv_heads=2), None)]
CONFIGS.append((Llama(**SHAPE), Llama(**{**SHAPE, "d_model": 16})))  # muP, from a base model half as wide


def sharded(config, base, mode):
    with torch.device("meta"):
        decoder = Decoder(config, base)
    decoder.set_activation_checkpointing(mode)
    for module in (*decoder.blocks, decoder):
        fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    decoder.to_empty(device="cpu")
    torch.manual_seed(0)
    decoder.init_weights()
    return decoder


def factors(decoder, base):
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in Decoder(base).named_parameters()}
    decoder.base_shapes = lambda: shapes
    optimizer = build_optimizer(decoder, mup=MuP(base.d_model))
    found = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert sorted(set(found.values())) == [1.5e-4, 3e-4]
    return found


def compare(rank):
    dist.init_process_group("gloo")
    input_ids = torch.arange(32).view(2, 16)
    for config, base in CONFIGS:
        torch.manual_seed(0)
        whole = Decoder(config, base)
        expected = whole(input_ids)
        expected.square().mean().backward()
        for mode in ("none", "selective"):
            shards = sharded(config, base, mode)
            assert (shards.head.weight is shards.embed.weight) is config.tie_embeddings
            for (name, part), (_, tensor) in zip(shards.named_parameters(), whole.named_parameters(), strict=True):
                assert torch.equal(part.full_tensor(), tensor), name
            if base is not None:
                assert factors(shards, base) == factors(whole, base)
            found = shards(input_ids)
            torch.testing.assert_close(found, expected)
            found.square().mean().backward()
            for (name, part), (_, tensor) in zip(shards.named_parameters(), whole.named_parameters(), strict=True):
                torch.testing.assert_close(part.grad.full_tensor(), tensor.grad, msg=lambda m, n=name: f"{n}: {m}")
    dist.barrier()


def test_two_shards_hold_the_weights_logits_and_gradients_of_the_whole():
    processes.run(compare)
