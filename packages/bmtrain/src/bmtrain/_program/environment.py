"""``examine_environment``: find environment variables that break a run or make it slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from bmt_core.errors import ConfigError
from bmt_core.launch import ONE_PROCESS, OTHER_LAUNCHERS, Launch, rendezvous_address

Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True)
class Finding:
    """An environment variable with its effect on a run and the remedy."""

    severity: Severity
    variable: str
    effect: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine whose environment is examined. ``cores`` is the number that this process
    may use.
    """

    cores: int
    device_type: str


@dataclass(frozen=True)
class _Rule:
    """``variable`` hurts when its value, in lower case, satisfies ``hurts``."""

    variable: str
    hurts: Callable[[str], bool]
    effect: str
    remedy: str


def examine_environment(environ: Mapping[str, str], machine: Machine) -> list[Finding]:
    """Return all findings, errors first.

    >>> environ = {"OMP_NUM_THREADS": "2", "CUDA_LAUNCH_BLOCKING": "1"}
    >>> machine = Machine(cores=2, device_type="cpu")
    >>> [finding.variable for finding in examine_environment(environ, machine)]
    ['CUDA_LAUNCH_BLOCKING']
    """
    findings = [
        *_rendezvous(environ),
        *(
            Finding("warning", rule.variable, rule.effect, rule.remedy)
            for rule in _RULES
            if rule.variable in environ and rule.hurts(environ[rule.variable].strip().lower())
        ),
        *_threads(environ, machine),
        *_network_interfaces(environ),
        *_allocator(environ, machine),
    ]
    return sorted(
        findings, key=lambda finding: ("error", "warning", "advice").index(finding.severity)
    )


def _is_on(value: str) -> bool:
    return value in ("1", "true", "on", "yes", "y", "t")


def _is_off(value: str) -> bool:
    return value in ("0", "false", "off", "no", "n", "f")


def _is_set(value: str) -> bool:
    return bool(value)


_UNSET = "Unset it, except while you look for an error."
_WAITS = "The host waits for every collective, so that nothing overlaps with communication."
_RULES = (
    _Rule(
        "CUDA_LAUNCH_BLOCKING",
        _is_on,
        "The host waits for every kernel: no overlap, and small kernels dominate.",
        _UNSET,
    ),
    _Rule("TORCH_NCCL_BLOCKING_WAIT", _is_on, _WAITS, _UNSET),
    _Rule("NCCL_BLOCKING_WAIT", _is_on, _WAITS, _UNSET),
    _Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value == "detail",
        "Every collective is preceded by another one that compares its arguments.",
        _UNSET,
    ),
    _Rule(
        "NCCL_DEBUG",
        lambda value: value in ("info", "trace"),
        "Every rank logs its connections, with TRACE every call.",
        "Set NCCL_DEBUG=WARN, which prints errors only.",
    ),
    _Rule(
        "NCCL_NVLS_ENABLE",
        lambda value: _is_off(value) or value == "1",
        "0 turns off reductions inside the NVLink switch; 1 makes a start without multicast"
        " memory fail.",
        "Unset it, and NCCL uses the switch where it can. Keep 0 on hosts where NCCL fails with"
        " multicast errors.",
    ),
    _Rule(
        "NCCL_P2P_DISABLE",
        _is_on,
        "GPUs of one host exchange data through host memory instead of NVLink or PCIe.",
        "Unset it, unless peer-to-peer copies hang on this host.",
    ),
    _Rule(
        "NCCL_SHM_DISABLE",
        _is_on,
        "Ranks of one host that are not linked talk through the network.",
        "Unset it.",
    ),
    _Rule(
        "NCCL_IB_DISABLE",
        _is_on,
        "Hosts exchange data over TCP instead of InfiniBand or RoCE.",
        "Unset it where there is such a network.",
    ),
    _Rule(
        "NCCL_ALGO",
        _is_set,
        "One algorithm is used for all sizes and operations.",
        "Unset it, or measure with: bmt bench",
    ),
    _Rule(
        "NCCL_PROTO",
        _is_set,
        "One protocol is used for all sizes.",
        "Unset it, or measure with: bmt bench",
    ),
    _Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value: value == "1",
        "All streams share one hardware queue: gathers and reductions wait behind computation.",
        "Unset it.",
    ),
    _Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _is_set,
        "Every allocation on the device is a cudaMalloc, and every release waits for the device.",
        _UNSET,
    ),
    _Rule(
        "CUDA_VISIBLE_DEVICES",
        lambda value: value in ("", "-1"),
        "No GPU is visible: the run uses the CPU.",
        "Unset it, or list the GPUs to use: CUDA_VISIBLE_DEVICES=0,1",
    ),
)


_FOR_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_OF_LAUNCHERS = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"),
    *(name for _, *names in OTHER_LAUNCHERS for name in names if name),
)


def describe_launcher(environ: Mapping[str, str]) -> str:
    """Return which launcher has started this process, and what it says of ranks and rendezvous.

    >>> describe_launcher({"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    'Slurm: rank 1 of 2, local rank 1 of 2, rendezvous at 127.0.0.1:26996'
    >>> describe_launcher({})
    'none: a run of one rank. torchrun, srun (Slurm) or mpirun (Open MPI) start more'
    """
    try:
        launch = Launch.from_env(environ)
        if launch.launcher == ONE_PROCESS:
            return "none: a run of one rank. torchrun, srun (Slurm) or mpirun (Open MPI) start more"
        ranks = (
            f"rank {launch.rank} of {launch.world_size}, local rank {launch.local_rank} of"
            f" {launch.local_world_size}"
        )
        if launch.world_size == 1:
            return f"{launch.launcher}: {ranks}"
        host, port = rendezvous_address(launch, environ)
    except ConfigError:
        return "unknown: see the environment below"
    return f"{launch.launcher}: {ranks}, rendezvous at {host}:{port}"


def _rendezvous(environ: Mapping[str, str]) -> Iterable[Finding]:
    """Check the launcher's variables with the code that reads them at start, and find out whether
    some are missing.
    """
    found = [name for name in _FOR_LAUNCHERS[:4] if name in environ]
    try:
        launch = Launch.from_env(environ)
        if launch.world_size > 1:
            rendezvous_address(launch, environ)
    except ConfigError as error:
        read = [name for name in (*_FOR_LAUNCHERS, *_OF_LAUNCHERS) if name in environ]
        yield Finding(
            "error",
            ", ".join(read),
            str(error),
            "Start with torchrun, or unset them for a run of one rank.",
        )
        return
    if found and launch.launcher == ONE_PROCESS:
        yield Finding(
            "warning",
            ", ".join(found),
            "RANK and WORLD_SIZE are not set, so that every process is a run of its own.",
            "Start with torchrun, which sets all of them, or unset these.",
        )


def _threads(environ: Mapping[str, str], machine: Machine) -> Iterable[Finding]:
    ranks = _positive(environ.get("LOCAL_WORLD_SIZE")) or 1
    share = max(1, machine.cores // ranks)
    text = environ.get("OMP_NUM_THREADS")
    if text is None:
        severity: Severity = "warning" if ranks > 1 and machine.cores > 1 else "advice"
        effect = (
            f"Every rank on this host computes with {machine.cores} threads on the CPU; torchrun"
            " sets 1 for each."
        )
        yield Finding(
            severity,
            "OMP_NUM_THREADS (unset)",
            effect,
            f"Set cores / ranks of this host: OMP_NUM_THREADS={share}",
        )
        return
    # A list has one number per level of nested parallelism. The first one counts here.
    threads = _positive(text.split(",")[0])
    if threads is None:
        yield Finding(
            "error",
            "OMP_NUM_THREADS",
            f"{text!r} is not a positive number.",
            f"Set OMP_NUM_THREADS={share}",
        )
    elif threads > share:
        effect = f"{ranks} ranks x {threads} threads compete for {machine.cores} cores."
        yield Finding("warning", "OMP_NUM_THREADS", effect, f"Set OMP_NUM_THREADS={share}")


def _network_interfaces(environ: Mapping[str, str]) -> Iterable[Finding]:
    world, local = (
        _positive(environ.get(name)) or 1 for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if environ.get(name) == "lo" and world > local:
            effect = (
                f"The loopback interface reaches this host only, and {world - local} ranks are"
                " on others."
            )
            yield Finding(
                "error", name, effect, "Unset it, or name the interface that connects the hosts."
            )


def _allocator(environ: Mapping[str, str], machine: Machine) -> Iterable[Finding]:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    values = {name: environ[name] for name in names if environ.get(name)}
    if len(set(values.values())) > 1:
        yield Finding(
            "warning",
            " and ".join(values),
            "Two names of one setting have different values.",
            f"Keep {names[0]} only.",
        )
    for name, value in values.items():
        if "max_split_size_mb" in value:
            effect = (
                "Large blocks are not split, so that buffers of different sizes cannot use each"
                " other's memory."
            )
            yield Finding(
                "warning",
                name,
                effect,
                f"Use {names[0]}=expandable_segments:True against fragmentation.",
            )
    if not values and machine.device_type == "cuda":
        effect = "Memory may fragment when buffers of many sizes come and go."
        yield Finding(
            "advice",
            f"{names[0]} (unset)",
            effect,
            f"If memory runs out early: {names[0]}=expandable_segments:True",
        )


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() and int(text) > 0 else None
