"""FLOPs of any module's training step: by hand, apart from what is recomputed, and without a trace in the module."""

import contextlib
import copy
import logging
import random
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import two_processes
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks.accounting import (
    CannotCount,
    count_flops,
    recompute_flops_per_token,
    training_flops_per_token,
)
from lightning_tricks.accounting.flop_counting import FlopCounter
from lightning_tricks.accounting.flop_counting.count_step import counting_real_step
from lightning_tricks.models import GPT2, Decoder, Llama

# 3 rows through Linear(8, 16) and Linear(16, 4): 2 * 3 * 8 * 16 = 768 and 2 * 3 * 16 * 4 = 384 forward. Backward each
# weight's gradient costs as much again, and so does each input's, but for the first layer's.
FORWARD, TOTAL = 768 + 384, 2 * 768 + 3 * 384


class Net(pl.LightningModule):
    def __init__(self, step=None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.step = step or (lambda self, x: self.run(x).sum())

    def run(self, x):
        return self.second(F.relu(self.first(x)))

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)


BATCH = torch.ones(3, 8)


def test_products_forward_and_backward_are_counted():
    assert count_flops(Net(), BATCH) == (TOTAL, 0)


def test_a_module_without_lightning_needs_only_a_training_step():
    class Plain(nn.Sequential):
        def training_step(self, batch):
            return self(batch).sum()

    assert count_flops(Plain(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), BATCH) == (TOTAL, 0)


def test_a_frozen_layer_spends_nothing_on_its_gradient():
    net = Net()
    net.first.requires_grad_(False)
    assert count_flops(net, BATCH) == (768 + 2 * 384, 0)


def test_convolutions_are_counted():
    net = Net(lambda self, x: self.conv(x).sum())
    net.conv = nn.Conv2d(3, 5, 3, padding=1)
    # each of 2 * 6 * 6 * 5 outputs is a product of 3 * 3 * 3; backward the weight's gradient alone
    assert count_flops(net, torch.ones(2, 3, 6, 6)) == (2 * 2 * 2 * 6 * 6 * 5 * 27, 0)


@pytest.mark.parametrize("kind", ["math", "fused"])
@pytest.mark.parametrize("heads_of_keys", [4, 2])
def test_attention_counts_in_full_whichever_kernel_runs_it(kind, heads_of_keys):
    def step(self, x):
        q = x * self.scale
        k, v = q[:, :heads_of_keys], q[:, :heads_of_keys]
        backend = (
            torch.nn.attention.SDPBackend.MATH if kind == "math" else torch.nn.attention.SDPBackend.FLASH_ATTENTION
        )
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads_of_keys < 4).sum()

    net = Net(step)
    net.scale = nn.Parameter(torch.ones(()))
    # 2 rows, 4 heads, 16 x 16 pairs of positions, width 8; two products forward, four backward
    assert count_flops(net, torch.ones(2, 4, 16, 8)) == (6 * 2 * 2 * 4 * 16 * 16 * 8, 0)


# by the shapes of both matrices: 12 rows, columns or inner indices, in 3 groups; a product of each has 2 * 8 * 16 FLOPs
GROUPED = {
    "rows": ((12, 8), (3, 8, 16)),
    "columns": ((3, 8, 16), (16, 12)),
    "inner": ((8, 12), (12, 16)),
    "one each": ((3, 4, 8), (3, 8, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_products_are_counted_whatever_their_groups_are(kind, dtype):
    def step(self, batch):
        ends = None if kind == "one each" else torch.tensor([2, 2, 12], dtype=torch.int32)
        return F.grouped_mm(self.a, self.b, offs=ends).square().sum()

    net = Net(step)
    net.a, net.b = (nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in GROUPED[kind])
    # forward, and the gradients of both
    assert count_flops(net, BATCH) == (3 * 12 * 2 * 8 * 16, 0)


def mixture(name):
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, intermediate_size=48, num_local_experts=4))
    own = {"moe_intermediate_size": 48, "num_experts": 4, "intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **own))


@pytest.mark.parametrize(
    ("name", "precision"), [("mixtral", "fp32"), ("qwen3_moe", "bf16-mixed"), ("mixtral", "bf16-true")]
)
def test_mixtures_of_transformers_have_the_flops_of_their_closed_form(name, precision):
    net = Net(lambda self, ids: self.model(input_ids=ids, labels=ids, use_cache=False).loss)
    net.model = mixture(name).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    model, again = count_flops(net, torch.ones(2, 16, dtype=torch.long), context=in_bf16 if "mixed" in precision else
                               contextlib.nullcontext)  # fmt: skip
    # weights that a token meets: q and o, k and v, the router, three matrices of two experts each, and the head
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 32 * 4 + 2 * 3 * 32 * 48 + 32 * 96
    attention = 2 * 2 * 16 * 32  # scores and values of 16 tokens
    assert again == 0
    # and a few FLOPs for the angles of the rotary embedding
    assert model / 32 == pytest.approx(3 * (2 * weights + attention), rel=0.001)


def test_what_a_checkpoint_runs_again_is_counted_apart():
    def again(self, x):
        return checkpoint(self.run, x, use_reentrant=False).sum()

    def again_reentrant(self, x):
        return checkpoint(self.run, x.requires_grad_(), use_reentrant=True).sum()

    # the newer form stops when it has what the backward pass needs, which the last product is not
    assert count_flops(Net(again), BATCH) == (TOTAL, 768)
    # the older one runs all, and wants a gradient of its input
    assert count_flops(Net(again_reentrant), BATCH) == (TOTAL + 768, FORWARD)


def test_a_gradient_of_a_gradient_is_the_models_own():
    def penalty(self, x):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(self.first(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    # forward, the gradient of x, and backward through that: each 768; the inner ones' gradient is one, too
    model, recompute = count_flops(Net(penalty), BATCH)
    assert recompute == 0
    assert model == 3 * 768


# the closed form of a recomputed forward pass asks for the architecture as the whole does
@pytest.mark.parametrize(
    ("attention", "mode", "grouped"),
    [
        (Llama, "none", 2), (GPT2, "none", None), (Llama, "selective", None), (GPT2, "selective", 2),
        (Llama, "full", 2), (GPT2, "full", None),
    ],
)  # fmt: skip
def test_closed_form_and_count_agree_on_our_decoder(attention, mode, grouped):
    config = attention(vocab_size=96, d_model=32, n_layers=1, n_heads=4, n_kv_heads=grouped, max_seq_len=64)
    tokens = torch.randint(0, 96, (2, 64))
    net = Net(lambda self, batch: self.decoder(batch, labels=batch))
    net.decoder = Decoder(config)
    net.decoder.set_activation_checkpointing(mode)
    model, recompute = (flops / tokens.numel() for flops in count_flops(net, tokens))
    assert model == pytest.approx(training_flops_per_token(config, 64, "full"), rel=0.01)
    assert recompute == pytest.approx(recompute_flops_per_token(config, 64, "full", mode), rel=0.01)


def everything(net: nn.Module) -> dict[str, object]:
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return state | {f"{name}.grad": p.grad for name, p in net.named_parameters()} | {"mode": net.training}


def random_states() -> list[object]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def test_the_module_its_batch_and_the_random_states_stay_as_they_were():
    def step(self, batch):
        batch["seen"] = True
        self.losses.append(1)
        self.calls += 1
        torch.manual_seed(5)
        noise = torch.randn(3, 8) * random.random() * np.random.rand()
        x = self.drop(self.norm(batch.pop("x") + noise))
        loss = self.run(x).sum()
        self.error(loss, loss)
        self.log("train/loss", loss, prog_bar=True)
        self.log_dict({"a": loss})
        return {"loss": loss}

    net = Net(step)
    net.norm, net.drop, net.error = nn.BatchNorm1d(8), nn.Dropout(0.5), torchmetrics.MeanSquaredError()
    net.losses, net.calls = [], 0
    hooked = []
    net.first.register_forward_hook(lambda *_: hooked.append(1))
    batch = {"x": BATCH.clone()}
    before, states = copy.deepcopy(everything(net)), random_states()
    model, _ = count_flops(net, batch)
    assert model >= TOTAL
    after = everything(net)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name], name
    assert random_states() == states
    assert net.losses == hooked == []
    assert net.calls == 0
    assert net.error._update_count == 0
    assert list(batch) == ["x"]
    assert torch.equal(batch["x"], BATCH)


def test_a_value_may_be_read_to_be_logged():
    def step(self, x):
        loss = self.run(x).sum()
        self.log("train/loss", loss.item() / 2)
        return loss

    assert count_flops(Net(step), BATCH) == (TOTAL, 0)


@contextlib.contextmanager
def in_bf16():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def test_metrics_that_look_at_values_do_not_stand_in_the_way():
    def step(self, x):
        out = self.run(x)
        assert out.dtype == torch.bfloat16
        target = torch.zeros(3, dtype=torch.long)
        self.accuracy(out[:, 0], target)  # looks whether the targets are all 0 or 1
        self.all.update(out[:, 0], target)
        self.log("train/accuracy", self.accuracy)
        self.log_dict(self.all)
        return out.float().sum()

    net = Net(step)
    net.accuracy = torchmetrics.classification.BinaryAccuracy()
    net.all = torchmetrics.MetricCollection([torchmetrics.classification.BinaryF1Score()])
    assert count_flops(net, BATCH, context=in_bf16) == (TOTAL, 0)
    assert net.accuracy._update_count == 0


def by_value(self, x):
    loss = self.run(x).sum()
    return loss * 2 if loss.item() > 0 else loss


KEPT = nn.Linear(8, 8)


def by_closure(self, x):
    return self.run(KEPT(x)).sum()


def by_shape(self, x):
    return self.run(x[x.sum(1) > 0]).sum()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (by_value, "Net: its work depends on the values of a tensor"),
        (by_shape, "depends? on the values of a tensor"),
        (by_closure, "Net: it uses tensors that are no parameters or buffers of the module"),
        (lambda self, x: None, "no loss"),
        (lambda self, x: self.run(x).sum().detach(), "no loss"),
        (lambda self, x: self.run(x).sum() / self.trainer.strategy.world, "needs trainer.strategy"),
        (lambda self, x: self.run(x).sum() + self.missing, "missing"),
    ],
    ids=["a branch by value", "a shape by value", "a closure", "no loss", "no gradient", "the strategy", "a mistake"],
)
def test_what_cannot_be_counted_is_said_with_its_reason(step, reason):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(CannotCount, match=reason) as caught:
        count_flops(Net(step), BATCH, trainer)
    assert "\n" not in str(caught.value)


def test_counting_is_silent(recwarn, caplog, capfd):
    def step(self, x):
        warnings.warn("a step's own warning", stacklevel=1)
        logging.getLogger("somewhere").error("a step's own line")
        return by_value(self, x)

    with pytest.raises(CannotCount):
        count_flops(Net(step), BATCH)
    assert not [w for w in recwarn if "own warning" in str(w.message)]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert "data-dependent" not in capfd.readouterr().err  # what torch itself has to say
    logging.getLogger("somewhere").error("after")
    assert caplog.records[-1].message == "after"


def test_the_iterator_flavour_is_refused():
    class Iterating(Net):
        def training_step(self, dataloader_iter):
            return self.run(next(dataloader_iter)).sum()

    with pytest.raises(CannotCount, match="takes the iterator"):
        count_flops(Iterating(), BATCH)


def test_plain_values_of_the_trainer_may_be_read():
    def step(self, x):
        assert self.trainer.world_size == 1
        self.logger.experiment.add_scalar("a", 1.0, self.global_step)
        return self.run(x).sum() * (self.trainer.max_steps + self.trainer.accumulate_grad_batches)

    trainer = pl.Trainer(accelerator="cpu", max_steps=7, accumulate_grad_batches=2, logger=False, barebones=False)
    assert count_flops(Net(step), BATCH, trainer) == (TOTAL, 0)


def test_manual_optimization_counts_every_backward_and_steps_nothing():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch):
            first, second = self.optimizers()
            schedule = self.lr_schedulers()
            assert schedule is None
            for optimizer in (first, second):
                optimizer.zero_grad()
                self.manual_backward(self.run(batch).sum())
                self.clip_gradients(optimizer, 1.0)
                optimizer.step()
            second.step(lambda: self.manual_backward(self.run(batch).sum()))

    net = Manual()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy._optimizers = [torch.optim.SGD(net.first.parameters()), torch.optim.SGD(net.second.parameters())]
    before = [p.clone() for p in net.parameters()]
    assert count_flops(net, BATCH, trainer) == (3 * TOTAL, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters())


def test_a_compiled_part_is_not_compiled_for_it(monkeypatch):
    net = Net()
    net.first = torch.compile(net.first, backend=lambda *_: pytest.fail("compiled"), fullgraph=True)
    assert count_flops(net, BATCH) == (TOTAL, 0)


def test_a_module_that_is_compiled_as_a_whole_is_counted_uncompiled():
    compiled = torch.compile(Net(), backend=lambda *_: pytest.fail("compiled"))
    net = pl.utilities.compile.from_compiled(compiled)
    assert "training_step" in vars(net)
    assert count_flops(net, BATCH) == (TOTAL, 0)


class Host(np.ndarray):
    """Data that must not be copied."""

    def __deepcopy__(self, memo):
        pytest.fail("copied")


def test_arrays_on_the_host_are_neither_copied_nor_written_to():
    net = Net(lambda self, x: self.run(x + float(self.data[0][0]) + float(self.kept.rows[1])).sum())
    array = np.ones(4).view(Host)
    net.data, net.kept = [array], type("Kept", (), {})()
    net.kept.rows = array
    assert count_flops(net, BATCH) == (TOTAL, 0)

    def writes(self, x):
        self.data[0][0] = 5
        return self.run(x).sum()

    net.step = writes
    with pytest.raises(CannotCount, match="Net: ValueError: assignment destination is read-only"):
        count_flops(net, BATCH)
    assert array[0] == 1
    array[0] = 2  # the module's own can still be written to


@pytest.mark.parametrize("held", [list(range(100_001)), {"rows": [(0,)] * 100_001}, torch.utils.data.TensorDataset])
def test_a_module_that_holds_much_on_the_host_is_not_copied(held):
    net = Net()
    net.held = held(torch.empty(100_001)) if isinstance(held, type) else held
    with pytest.raises(CannotCount, match=r"it holds .*more than 100,000"):
        count_flops(net, BATCH)


def test_the_step_runs_in_the_context_that_is_given():
    def step(self, x):
        out = self.run(x)
        assert out.dtype == torch.bfloat16
        return out.float().sum()

    assert count_flops(Net(step), BATCH, context=in_bf16) == (TOTAL, 0)
    with pytest.raises(CannotCount, match="AssertionError"):
        count_flops(Net(step), BATCH)


def test_operators_that_arrive_whole_are_counted_under_inference_mode():
    counter = FlopCounter(net := Net())
    with torch.inference_mode(), counter.counting():
        net.run(BATCH)
    assert counter.flops == (FORWARD, 0)


def test_a_torch_that_does_not_tell_compiled_code_gives_no_figure_of_the_real_step(monkeypatch):
    monkeypatch.delattr(torch._dynamo.eval_frame, "_callback_from_stance")
    net, strategy = Net(), pl.Trainer(accelerator="cpu", barebones=True).strategy
    with counting_real_step(SimpleNamespace(strategy=strategy), net) as counter:
        net.run(BATCH)
    with pytest.raises(CannotCount, match=r"^this version of torch does not tell whether code is compiled$"):
        assert counter.flops


def test_what_a_step_asks_of_its_logger_does_nothing():
    def step(self, x):
        with self.logger.experiment.section("first") as experiment:
            experiment.add_scalar("sum", 1.0)
        assert not hasattr(experiment, "__len__")
        return self.run(x).sum()

    assert count_flops(Net(step), BATCH) == (TOTAL, 0)


def test_a_count_that_cannot_be_interrupted_is_no_figure():
    counter = FlopCounter(net := Net())

    def step(product):
        with counter.counting(False):
            product(BATCH)

    with counter.counting():
        net.run(BATCH)
        step(net.first)  # as an optimizer that multiplies matrices
    assert counter.flops == (FORWARD, 0)
    with counter.counting(), FlopCounter(net):
        step(net.first)
    with pytest.raises(CannotCount, match="training_step has entered another dispatch mode"):
        assert counter.flops


def count_in_shards(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    net = Net()
    net.scale = nn.Parameter(torch.ones(()))
    mesh = init_device_mesh("cpu", (2,))
    net.register_buffer("offset", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))

    def step(self, x):
        assert not isinstance(self.offset, nn.Parameter)
        return (self.run(x) + self.offset).sum()

    net.step = step
    fully_shard(net.first, mesh=mesh)
    fully_shard(net.second, mesh=init_device_mesh("cpu", (2,)))
    assert net.first.weight.to_local().shape == (8, 8)
    assert count_flops(net, BATCH) == (TOTAL, 0)
    assert net.first.weight.to_local().shape == (8, 8)
    rows, weight = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]), distribute_tensor(torch.ones(8, 16), mesh)
    counter = FlopCounter(net)
    with counter.counting():
        assert (rows @ weight).shape == (4, 16)
    assert counter.flops == (2 * 2 * 8 * 16, 0), "the other two rows are the other rank's"
    net.run(BATCH).sum().backward()  # still works
    assert net.first.weight.grad is not None
    torch.distributed.destroy_process_group()


def test_sharded_layers_count_as_whole_ones_on_a_copy_and_as_the_work_of_this_device_where_they_run():
    two_processes.run(count_in_shards)
