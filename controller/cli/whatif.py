"""`trimtab whatif`: recorded traffic under several policies or plans, paired and compared."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.engine_bridge.errors import FlagError, TraceError

if TYPE_CHECKING:
    from trimtab.engine_bridge.engine_spec import EngineSpec
    from trimtab.engine_bridge.plan import Plan
    from trimtab.engine_bridge.trace import Trace
    from trimtab.training.whatif.run import Contender

DEFAULT_ENGINE = "h100:llama-3.1-8b-tp1"
DEFAULT_POLICIES = ("static", "stock-fcfs", "stock-priority", "reactive")
_MOST_SEEDS = 1000
_MOST_JOBS = 1024


TracePath = Annotated[
    Path | None, typer.Option("--trace", help="Recorded traffic, in any known format.")
]
Audit = Annotated[
    list[Path] | None,
    typer.Option(
        "--audit",
        help="Instead of traffic: the daemon's audit files, or folders of them. Decides again what "
        "it decided; a --policy is asked what it would have wanted.",
    ),
]
Plans = Annotated[
    list[str] | None,
    typer.Option(
        "--plan",
        help="Plan file, or default or published. The first sets targets and values; each further "
        "one is compared as static@NAME.",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help=f"Policy under the first plan, several times: {', '.join(DEFAULT_POLICIES)} (all of "
        "them if none is given; static if several plans are), learned, bundle:FOLDER or "
        "models:/NAME@ALIAS.",
    ),
]
Engine = Annotated[str, typer.Option("--engine", help="Engine model or engine file.")]
Seeds = Annotated[
    int, typer.Option("--seeds", help="How many variations of the traffic; the first as recorded.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result for machines.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report for people.")]
Requests = Annotated[
    Path | None,
    typer.Option("--requests", help="Write one row a request and policy (Parquet)."),
]
Drain = Annotated[
    float | None,
    typer.Option(
        "--drain-s",
        help="Longest time after the last arrival for requests to end, seconds; left out, twice "
        "the longest target, at least 600.",
    ),
]
Jobs = Annotated[int | None, typer.Option("--jobs", help="Processes at once; left out, one a CPU.")]
MaxSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Most requests in a batch.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Most tokens in a step.")
]
Blocks = Annotated[int | None, typer.Option("--num-gpu-blocks", help="KV blocks.")]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="Tokens in a KV block.")]
Caching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse cached prefixes."
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        help="Speculation: most draft tokens of a request in a step; stock policies always verify "
        "so many. Each tier has the plan's draft_tokens; in a plan without any, all tiers but the "
        "one of the least weight have this. 0 leaves out an engine file's draft model.",
    ),
]
DraftUs = Annotated[
    float | None, typer.Option("--draft-us", help="Microseconds that a draft token costs.")
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="How often drafts are right, each given that the one before it was: T0=0.75,T2=0.4. "
        "Other tiers have the trace's column acceptance; without it they are not drafted for.",
    ),
]
ImageUs = Annotated[
    float | None,
    typer.Option(
        "--image-us",
        help="Microseconds that the encoder takes for a prompt token of an image, on an engine "
        "file without an encoder section or in the place of what it says.",
    ),
]
AudioUs = Annotated[float | None, typer.Option("--audio-us", help="The same for a clip of audio.")]
VideoUs = Annotated[float | None, typer.Option("--video-us", help="The same for a video.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("whatif")(whatif)


def whatif(
    context: typer.Context,
    trace: TracePath = None,
    audit: Audit = None,
    plan: Plans = None,
    policy: Policies = None,
    engine: Engine = DEFAULT_ENGINE,
    seeds: Seeds = 1,
    json: Json = None,
    html: Html = None,
    requests: Requests = None,
    drain_s: Drain = None,
    jobs: Jobs = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    num_gpu_blocks: Blocks = None,
    block_size: BlockSize = None,
    enable_prefix_caching: Caching = None,
    draft_tokens: DraftTokens = None,
    draft_us: DraftUs = None,
    acceptance: Acceptance = None,
    image_us: ImageUs = None,
    audio_us: AudioUs = None,
    video_us: VideoUs = None,
) -> None:
    """Replay recorded traffic under several policies or plans, and say how each tier fares.

    With --audit: decide again what a daemon decided, and fail if a decision comes out otherwise.
    """
    if audit:
        from trimtab.controller.cli.audit_replay import replay_audit

        _left_out(context, keep=("audit", "policy", "json"))
        _no_repeats("--policy", policy or [])
        replay_audit(audit, policies=[_resolved(name) for name in policy or []], json=json)
        return
    if trace is None:
        raise FlagError("--trace", bound="given", remedy="or --audit for a daemon's audit log")
    from trimtab.controller.cli.study import Outputs, deliver, run_with_progress
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.training.whatif.drafting import check_acceptance, with_draft, with_draft_lengths
    from trimtab.training.whatif.encoding import encoder_notes, with_encoder
    from trimtab.training.whatif.run import Study, default_drain_s

    limits = {
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--num-gpu-blocks": num_gpu_blocks,
        "--block-size": block_size,
    }
    _in_range("--seeds", seeds, 1, _MOST_SEEDS)
    _in_range("--jobs", jobs, 1, _MOST_JOBS)
    _in_range("--drain-s", drain_s, 0.0, 1e6)
    for flag, limit in limits.items():
        _in_range(flag, limit, 1, 2**31 - 1)
    outputs = Outputs(json=json, html=html, requests=requests)
    outputs.check(inputs=[trace, *(Path(name) for name in plan or [] if Path(name).is_file())])
    contenders = contenders_of(policies=policy or [], plans=plan or [])
    spec = get_engine_spec(engine).with_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    spec = with_draft(
        spec,
        contenders[0].plan,
        tokens=draft_tokens,
        us_per_token=draft_us,
        acceptance=acceptance,
    )
    spec = with_encoder(spec, image_us=image_us, audio_us=audio_us, video_us=video_us)
    contenders = tuple(replace(c, plan=with_draft_lengths(c.plan, spec)) for c in contenders)
    traffic = read_traffic(trace)
    check_acceptance(traffic, spec)
    for note in encoder_notes(traffic, spec):
        typer.echo(f"trimtab: {note}", err=True)
    check_fit(traffic, [contender.plan for contender in contenders], spec)
    study = Study(
        trace=traffic,
        plan=contenders[0].plan,
        contenders=contenders,
        spec=spec,
        seeds=tuple(range(seeds)),
        drain_s=default_drain_s(contenders[0].plan) if drain_s is None else drain_s,
        keep_requests=requests is not None,
    )
    command = command_line(
        "whatif",
        {"--trace": trace, "--plan": plan, "--policy": policy, "--engine": engine}
        | {"--seeds": seeds, "--drain-s": drain_s, **limits}
        | {"--draft-tokens": draft_tokens, "--draft-us": draft_us, "--acceptance": acceptance}
        | {"--image-us": image_us, "--audio-us": audio_us, "--video-us": video_us}
        | {"--html": html},
        caching=enable_prefix_caching,
    )
    outcome = run_with_progress(study, processes=jobs)
    deliver(outcome, outputs=outputs, command=command)


def contenders_of(*, policies: Sequence[str], plans: Sequence[str]) -> tuple[Contender, ...]:
    """The contenders that the flags ask for: the first plan's policies, then the other plans.

    Raises:
        FlagError: an unknown policy, or the same policy or plan twice.
        PlanError: a plan cannot be read.
        BundleError: a policy's bundle cannot be read, or does not fit the first plan.
        ModelError: a registry has no such model.
    """
    from trimtab.agents.registry import make_policy
    from trimtab.engine_bridge.plan import load_plan
    from trimtab.training.whatif.run import Contender

    if not policies:
        policies = ("static",) if len(plans) > 1 else DEFAULT_POLICIES
    _no_repeats("--policy", policies)
    loaded = [load_plan(name) for name in plans] or [load_plan()]
    _no_repeats("--plan", [plan.name for plan in loaded])
    own = [Contender(label=name, policy=_resolved(name), plan=loaded[0]) for name in policies]
    for contender in own:
        make_policy(contender.policy).reset(contender.plan, 0)
    others = [
        Contender(label=f"static@{plan.name}", policy="static", plan=plan) for plan in loaded[1:]
    ]
    return (*own, *others)


def _resolved(policy: str) -> str:
    """The name with a model of a registry fetched into a folder; others as they are."""
    if not policy.startswith("models:"):
        return policy
    # Only who names a model needs the registry's libraries.
    from trimtab.training.learning.model_registry import resolve_policy

    return resolve_policy(policy)


def check_fit(trace: Trace, plans: Sequence[Plan], spec: EngineSpec) -> None:
    """Refuse traffic that the plans or the engine cannot take, before any run.

    Raises:
        PlanError: a plan lacks a tier of the trace, or has other tiers than the first plan.
        FlagError: prefix blocks that are no whole number of KV blocks.
    """
    from trimtab.engine_bridge.errors import PlanError

    for plan in plans:
        for name in trace.tier_names:
            plan.tier_index(name)
        if plan.tier_names != plans[0].tier_names:
            raise PlanError(
                f"plan {plan.name}",
                key="tiers",
                value=", ".join(plan.tier_names),
                bound=f"those of plan {plans[0].name}, {', '.join(plans[0].tier_names)}",
                remedy="give plans of the same tiers, in the same order",
            )
    sizes = {int(tokens) for tokens in set(trace.prefix_block_tokens.tolist()) if tokens}
    for tokens in sorted(sizes):
        if spec.enable_prefix_caching and tokens % spec.block_size:
            raise FlagError(
                "--block-size",
                value=spec.block_size,
                bound=f"a divisor of {tokens}, the tokens of a prefix block of the trace",
                remedy="give another --block-size, or --no-enable-prefix-caching",
            )


def read_traffic(path: Path) -> Trace:
    """A trace of at least one request.

    Raises:
        TraceError: it cannot be read, or is empty.
    """
    import numpy as np

    from trimtab.training.traces import read_trace

    # A fixed generator: what a format leaves open must not differ between two calls.
    trace = read_trace(path, rng=np.random.default_rng(0))
    if not len(trace):
        raise TraceError(path.name, value="0 requests", bound="at least one request")
    return trace


def _left_out(context: typer.Context, *, keep: Sequence[str]) -> None:
    """Refuse flags that were given and say nothing beside --audit."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in keep and source is not None and source.name == "COMMANDLINE":
            raise FlagError(option.opts[0], bound="left out beside --audit")


def _in_range(flag: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise FlagError(flag, value=value, bound=f"from {low:,g} to {high:,g}")


def _no_repeats(flag: str, names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise FlagError(flag, value=name, bound="given once", remedy="leave one of them out")


def command_line(name: str, options: Mapping[str, object], *, caching: bool | None) -> str:
    """The command line that gives the same result; options that were left out stay out."""
    words = ["trimtab", name]
    for flag, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                words += [flag, shlex.quote(str(one))]
    if caching is not None:
        words.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
    return " ".join(words)
