"""Refusals that more than one place gives, one sentence each: several techniques, or search and runtime.

A technique's `fits` returns them as they are; the runtime raises `error_of` them.
"""

from __future__ import annotations

from collections.abc import Sequence

from memtune.errors import ApplyError
from memtune.technique import Reason, Technique


def error_of(reason: Reason, evidence: str = "") -> ApplyError:
    """Return `reason` as an error of `apply` or of a step, with what the live model showed."""
    first = reason.text.split()[0]
    is_name = "." in first or "=" in first  # of an op, or of a knob
    text = reason.text if is_name else reason.text[0].upper() + reason.text[1:]
    return ApplyError(f"{text}.", evidence=evidence, fix=reason.fix, code=reason.code)


def steps_others(technique: Technique, names: Sequence[str]) -> Reason | None:
    """Return why `technique` cannot replace the parameters of an optimizer that steps those in `names`."""
    replaces = {
        "sharding.states": technique.effects.shards not in ("none", "replicas"),
        "sharding.parallel": technique.kind != "none",
        "offload.states": technique.kind != "none",
    }
    if not names or not replaces.get(technique.slot, False):
        return None
    return Reason(
        f"the optimizer steps {', '.join(names)}, which would go on with parameters that are replaced",
        "one optimizer with a parameter group for each",
        "MT376",
    )


def uneven_nodes(degree: int, per_node: int) -> Reason | None:
    """Return why collectives by node cannot divide the `degree` ranks that share a copy of the model."""
    if degree % per_node:
        return Reason(
            f"nodes of {per_node} ranks do not divide the {degree} ranks that share a copy of the model",
            "ranks_per_node: a divisor of the sharding degree",
            "MT342",
        )
    if per_node == 1:
        return Reason(
            "every node has one of the ranks that share a copy of the model: there is no fast link to use"
            " instead",
            "sharding.communication: {kind: none}",
            "MT342",
        )
    return None


def collective_runs_twice(op: object, block: str = "the blocks") -> Reason:
    """Return why a block with a collective cannot run again in backward."""
    return Reason(
        f"{op} runs inside {block}: a second run would exchange data between ranks again",
        "move it out of the block, or choose recompute: {kind: none}",
        "MT306",
    )


def differentiated_again(what: str) -> Reason:
    """Return why `what` does not work where `loss` differentiates gradients."""
    return Reason(
        f"loss() differentiates gradients (create_graph=True), and {what}",
        "sharding: {states: {kind: zero1}}, or ddp",
    )


def one_graph() -> Reason:
    """Return why techniques that act on blocks do not work with `execution: {compile: model}`."""
    return Reason("one graph holds all blocks", "execution: {compile: blocks}")


def clipping_unnoticed_in_step(fix: str) -> Reason:
    """Return why gradients cannot be offloaded in backward if the smallest parameter has none."""
    return Reason(
        "the smallest parameter gets no gradient, so clipping by norm could not be noticed", fix, "MT364"
    )


def no_experts() -> Reason:
    """Return why experts cannot be offloaded."""
    return Reason(
        "the model has no experts: modules of a block, in a list whose name has `experts`, all with equal"
        " parameters",
        "offload: {states: {kind: zero_infinity}}",
        "MT381",
    )


def several_stages(states: str) -> Reason:
    """Return why state sharding of kind `states` cannot reduce in each backward on interleaved stages."""
    return Reason(
        f"sharding.states: {states} needs one stage per rank",
        "schedule: 1f1b, or sharding: {states: {kind: zero1}}",
    )


def tied_stages(states: str, parameter: str) -> Reason:
    """Return why state sharding of kind `states` cannot reduce a parameter of two stages in each backward."""
    return Reason(
        f"sharding.states: {states}: the first and the last stage share {parameter}",
        "sharding: {states: {kind: zero1}}",
    )


def copies_follow_schedule(states: str) -> Reason:
    """Return why state sharding of kind `states` does not work with activation offload by stage."""
    return Reason(
        f"sharding.states: {states} does not work where copies follow the schedule",
        "offload.activations: {kind: copy_out}, or sharding: {states: {kind: zero1}}",
    )


def no_factors(problem: str) -> Reason:
    """Return why nested sharding cannot divide the ranks."""
    return Reason(problem, "factors that divide one another and the ranks", "MT345")


def fits_already(fix: str) -> Reason:
    """Return why a plan that stays within a budget changes nothing; `fix` is the setting without it."""
    return Reason("everything fits into the budget as it is", fix)


def two_budgets(other: str = "share") -> Reason:
    """Return why `budget_bytes` and the knob `other` exclude each other."""
    return Reason(f"budget_bytes and {other} both set the budget", "give one of them")


def no_budget(fix: str) -> Reason:
    """Return why a plan needs a budget of its own or the search's."""
    return Reason("there is no budget to plan for", fix)


def nothing_worth_recompute() -> Reason:
    """Return why recompute within the budget would run no op again."""
    return Reason("no tensor is worth freeing and recomputing", "recompute: {kind: none}")


def no_blocks_to_offload() -> Reason:
    """Return why activations cannot be offloaded block by block."""
    return Reason(
        "the model has no blocks whose activations can be offloaded", "def blocks(model) in model.py"
    )


def no_blocks_to_load() -> Reason:
    """Return why weights cannot be offloaded block by block."""
    return Reason(
        "the model has no blocks whose weights can be offloaded",
        "list them in def blocks(model) in model.py",
        "MT364",
    )


def no_large_activation(min_bytes: int) -> Reason:
    """Return why no saved activation of a block is offloaded."""
    return Reason(f"no saved activation has {min_bytes} bytes", "a smaller min_bytes")


def block_runs_again(fix: str) -> Reason:
    """Return why a plan that names saved tensors does not work for blocks that are called repeatedly."""
    return Reason("a block runs several times, and its tensors have no addresses", fix)


def no_optimizer_state() -> Reason:
    """Return why offload of states would move nothing."""
    return Reason("the optimizer has no state to offload")


def float32_weights(fix: str) -> Reason:
    """Return why the native update does not work on weights of another type."""
    return Reason("the native update keeps float32 weights", fix, "MT318")


def few_blocks(blocks: int, fix: str) -> Reason:
    """Return why a window, a stride or a number of stages exceeds the model's blocks."""
    return Reason(f"the model has {blocks} blocks only", fix, "MT364")


def no_block_to_defer(deferred: Sequence[int], blocks: int) -> Reason | None:
    """Return why updates of the blocks `deferred` of a model with `blocks` cannot be deferred."""
    if max(deferred, default=-1) < blocks:
        return None
    return Reason(
        f"there is no block {max(deferred)} to defer, blocks count from 0",
        "no deferred, to have it solved",
        "MT364",
    )


def few_blocks_for_stages(blocks: int, stages: int, fix: str) -> Reason:
    """Return why `blocks` cannot be divided into `stages`."""
    return Reason(f"{blocks} blocks are fewer than {stages} stages", fix)


def no_chain(why: object, fix: str) -> Reason:
    """Return why the blocks cannot be cut into stages."""
    return Reason(f"the blocks are no chain: {why}", fix)


def few_tokens(tokens: int, parts: int, fix: str) -> Reason:
    """Return why the tokens cannot be divided into `parts`."""
    return Reason(f"there are {tokens} tokens, fewer than {parts} parts", fix)


def one_rank(purpose: str = "") -> Reason:
    """Return why a technique over ranks has nothing to do; `purpose` continues the sentence."""
    return Reason(f"there is only one rank{purpose}", "--gpus or --workers 2 and more")


def uneven_groups(name: str, size: int, ranks: int) -> Reason | None:
    """Return why `ranks` cannot be divided into groups of `size`, the value of the knob `name`."""
    if ranks % size == 0:
        return None
    near = " or ".join(map(str, [d for d in range(2, ranks + 1) if ranks % d == 0][:4]))
    wrong = f"is more than the {ranks} ranks" if size > ranks else f"must divide the {ranks} ranks"
    return Reason(f"{name}={size} {wrong}", f"{name}: {near}", "MT321")


def uneven_reshard(group: int, degree: int) -> Reason | None:
    """Return why units sharded over `degree` ranks cannot be resharded to groups of `group` of them."""
    if group < degree and degree % group == 0:
        return None
    near = " or ".join(str(each) for each in range(2, degree) if degree % each == 0)
    return Reason(
        f"groups of {group} are no smaller equal groups of the {degree} ranks that share a copy",
        f"reshard_after_forward: {near}" if near else "reshard_after_forward: true",
        "MT321",
    )


def no_copies(ranks: int, what: str) -> Reason:
    """Return why `what` has nothing to work on if no two ranks hold the same part of the model."""
    return Reason(
        f"all {ranks} ranks share layers: {what} has no copies of a part to work on",
        "sharding.parallel of a smaller degree, or sharding.states: {kind: none}",
        "MT321",
    )


def reshard_among_sharers(states: str) -> Reason:
    """Return why groups of neighbouring ranks cannot share a unit if neighbours share layers."""
    return Reason(
        f"sharding.states: {states} keeps units sharded over neighbouring ranks, which share layers here",
        "reshard_after_forward: true",
    )


def hidden_graph(what: str) -> Reason:
    """Return why DDP cannot find unused parameters under `what`, which makes the graph in backward."""
    return Reason(
        f"{what} does not work with find_unused_parameters: true: DDP cannot search for unused parameters in"
        " a graph that is made in backward",
        "online: false, or find_unused_parameters: false",
    )


def not_contiguous(parameter: str) -> Reason:
    """Return why a parameter cannot be divided as a flat row of elements."""
    return Reason(
        f"{parameter} has gaps in memory, or shares memory with another tensor",
        "offload: {states: {kind: zero_infinity}}",
        "MT318",
    )


def changes_input(block: str) -> Reason:
    """Return why `block` cannot run again in backward: its input would differ."""
    return Reason(
        f"{block} changes its input in place, so it cannot be run a second time",
        "write x = x + y instead of x += y at the start of its forward, or choose recompute: {kind: none}",
        "MT306",
    )


def no_dimension(parameter: str) -> Reason:
    """Return why a scalar parameter cannot be sharded."""
    return Reason(f"{parameter} has no dimension to divide", "give it the shape (1,)")


def trains_with_others() -> Reason:
    """Return why fake ranks cannot be set up in this process."""
    return Reason("this process trains with others already", "plan in a process of its own")


def gradients_changed(fix: str) -> Reason:
    """Return why a step cannot use gradients that were changed after some had been used or offloaded."""
    return Reason(
        "gradients were changed between backward and the optimizer's step, as clipping by norm does",
        fix,
        "MT364",
    )


def second_optimizer(count: int) -> Reason:
    """Return why an optimizer that memtune does not know cannot update `count` of the model's parameters."""
    return Reason(
        f"another optimizer steps {count} parameters of the model, whose gradients this config has freed",
        "one optimizer with parameter groups, given to memtune.apply",
        "MT364",
    )


def missing_gradients(count: int, where: str, fix: str) -> Reason:
    """Return why ranks cannot average: `count` parameters have no gradient; `where`: step or backward."""
    return Reason(f"{count} parameters got no gradient in this {where}", fix, "MT346")


def other_parameters() -> Reason:
    """Return why the averaging of gradients has no effect any more."""
    return Reason("the model's parameters are no longer those whose gradients are averaged", "", "MT324")


def does_not_rotate(why: str) -> Reason:
    """Return why a weight cannot be sharded over a ring of ranks."""
    return Reason(
        f"a weight cannot go round the ranks: {why}", "another degree, or parallel: {kind: none}", "MT390"
    )


def no_divisible_experts(why: str) -> Reason:
    """Return why ranks cannot divide the experts of a model."""
    return Reason(
        f"no experts can be divided over the ranks: {why}",
        "another degree, or parallel: {kind: none}",
        "MT390",
    )


def unsummed_gradient(parameter: str) -> Reason:
    """Return why model parallelism is not in effect for `parameter`."""
    return Reason(f"the gradient of {parameter} is not summed over the ranks", "", "MT392")


def no_second_copy(weights: int) -> Reason:
    """Return why asynchronous updates of `weights` are not in effect."""
    return Reason(f"{weights} weights have no second copy on the host", "", "MT309")


def resident_between_steps(n_bytes: int) -> Reason:
    """Return why block offload is not in effect."""
    return Reason(
        f"{n_bytes} bytes of the blocks' parameters are on the device between two steps", "", "MT309"
    )


def not_averaged(count: int) -> ApplyError:
    """Return the error of a rank that skipped `count` parameters, while other ranks averaged theirs."""
    return error_of(
        missing_gradients(
            count,
            "backward",
            "sharding: {states: {kind: fsdp}}, or a model whose ranks use the same parameters",
        ),
        "Ranks average gradients as soon as they are ready, so every rank needs each of them in every"
        " backward.",
    )


def outside_of_step() -> ApplyError:
    """Return the error of a forward outside of `Tuned.step` under a layer-major order."""
    return ApplyError(
        "This config is layer-major: it runs each block over all micro-batches before the next one.",
        evidence="Only Tuned.step has all micro-batches.",
        fix="tuned.step(batches)",
        code="MT311",
    )


def second_backward() -> Reason:
    """Return why backward cannot run twice through a region that frees values as backward reads them."""
    return Reason(
        "backward runs a second time, but the tensors that it needs have been freed",
        "add the losses up before one backward(), or choose recompute: {kind: none}",
        "MT326",
    )


def second_order(where: str) -> Reason:
    """Return why a backward of a backward does not work; `where` names the region."""
    return Reason(
        f"gradients of gradients do not work under {where}", "choose recompute: {kind: none}", "MT326"
    )


def inside_torch_func(region: str) -> Reason:
    """Return why claims on what `region` saves cannot be met in a call by `torch.func`."""
    return Reason(
        f"torch.func calls {region}, and allows no hooks on saved tensors",
        "recompute: {kind: none} and offload.activations: {kind: none}, or torch.autograd.grad in the loss",
        "MT326",
    )


def no_budget_to_plan(technique: Technique) -> ApplyError:
    """Return the error for a technique that is planned without a budget."""
    return ApplyError(
        f"{technique.slot}: {{kind: {technique.kind}}} has no budget to plan for.",
        fix="give budget_bytes or share",
        code="MT316",
    )


def plan_of_other_model(technique: str, evidence: str, fix: str = "") -> ApplyError:
    """Return the error for a plan that is missing, or was made for another model or other ranks.

    Args:
        technique: `recompute: {kind: planned}`.
        evidence: The difference between plan and model.
        fix: A fix other than a new plan.
    """
    search = "memtune search  or  memtune trial --config  makes one"
    return ApplyError(
        f"{technique} needs a plan for this model and its ranks.",
        evidence=evidence,
        fix=f"{search}; or {fix}" if fix else search,
        code="MT316",
    )


def require_blocks(planned: int, blocks: int, technique: str, fix: str = "") -> None:
    """Raise `plan_of_other_model` if a plan for `planned` blocks is used for a model of `blocks`."""
    if planned != blocks:
        evidence = f"It is for {planned} blocks, the model has {blocks}."
        raise plan_of_other_model(technique, evidence, fix)
