"""The running bmt: ``init_distributed()`` makes one :class:`Runtime`, ``shutdown()`` ends it,
``current()`` returns it.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bmt_core.comm.annotate import PLACES
from bmt_core.comm.host_addresses import Hosts, hosts_of, name_and_address
from bmt_core.comm.observer import ObserverContext, RunObserver, only_one
from bmt_core.comm.protocols import CommBackend, CommContext, Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import ConfigError, NotInitializedError
from bmt_core.keyword_arguments import explain_keywords
from bmt_core.launch import OPEN_MPI, SLURM, Launch, separate_runs
from bmt_core.ops import Kernels, choose_kernels
from bmt_core.ops.kernel_choice import VARIABLE as KERNELS_VARIABLE
from bmt_core.plugins import Registry
from bmt_core.plugins.comparison import RankReport, check_reports
from bmt_core.plugins.protocols import MakeBlock
from bmt_core.run.bmtrain_names import (
    ARGUMENTS_OF_OTHERS,
    check_axes_are_provided,
    with_context_axis,
)
from bmt_core.run.lanes import Lanes
from bmt_core.run.rendezvous import (
    launcher_serves_store,
    limit_silence,
    rendezvous_store,
    server_address,
)
from bmt_core.run.start_section import start_section
from bmt_core.run.topology import (
    Topology,
    check_axis_sizes,
    data_ranks_of_host,
    grid_sizes,
    kinds_of_axes,
)
from bmt_core.run.uncaught_errors import UncaughtErrors
from bmt_core.settings import (
    DEFAULT_COMM_BACKEND,
    DEFAULT_GRADIENTS,
    DEFAULT_REDUCE_DTYPE,
    DEFAULT_TIMEOUT,
    DEFAULT_ZERO_LEVEL,
    GradientsOfRanks,
    MeshAxis,
    OptimizerShards,
    ReduceDtype,
    RunSettings,
    ShardSize,
    common_settings,
    is_timeout,
)
from bmt_core.user_warnings import warn_user

_current: Runtime | None = None
_uncaught: UncaughtErrors | None = None
_starts = 0

StateT = TypeVar("StateT")


class Runtime:
    """The objects of one run, such as its grid and backend. :func:`init_distributed` makes it;
    others only read it.
    """

    def __init__(
        self,
        *,
        settings: RunSettings,
        launch: Launch,
        device: torch.device,
        registry: Registry,
        topology: Topology,
        backend: CommBackend,
        kernels: Kernels,
        observer: RunObserver,
    ) -> None:
        self.settings = settings
        self.launch = launch
        self.device = device
        self.registry = registry
        self.topology = topology
        self.backend = backend
        self.kernels = kernels
        self.observer = observer
        """Watches the calls of this rank; one that does nothing without a package for it."""
        self.world: Group = topology.group(topology.sizes)
        self.lanes = Lanes(topology, device)
        self.make_block: MakeBlock | None = None
        self.at_shutdown: list[Callable[[], None]] = []
        """Called by :func:`shutdown`, for example to remove hooks from torch."""
        self._states: dict[object, Any] = {}

    def state(self, kind: Callable[[Runtime], StateT]) -> StateT:
        """Return the object that ``kind(runtime)`` has made at the first call. It lives as long as
        the run.
        """
        if kind not in self._states:
            self._states[kind] = kind(self)
        state: StateT = self._states[kind]
        return state

    @property
    def rank(self) -> int:
        """The index of this process among all."""
        return self.launch.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.launch.world_size

    @property
    def gradient_divisor(self) -> int:
        """The number by which gradients that were summed over ranks are divided before they
        reach ``.grad``.
        """
        return self.topology.data_size if self.settings.gradients == "mean" else 1

    def describe(self) -> str:
        """One line: world, grid, device, backend, kernels, number of plugins."""
        grid = " x ".join(f"{name}={size}" for name, size in self.topology.sizes.items())
        states = ", optimizer states over all" if self.topology.over_replicas else ""
        plugins = len(self.registry.describe())
        return (
            f"bmt: {self.world_size} rank{'s' if self.world_size > 1 else ''} ({grid}{states}) on"
            f" {self.device.type}, backend {self.backend.name}, kernels {self.kernels.name},"
            f" {plugins} plugin{'s' * (plugins != 1)}"
        )


@explain_keywords(**ARGUMENTS_OF_OTHERS)
def init_distributed(
    init_method: str = "env://",
    seed: int = 0,
    pipe_size: int = -1,
    num_micro_batches: int | None = None,
    tp_size: int = 1,
    zero_level: int | None = None,
    *,
    axis_sizes: Mapping[str, int] | None = None,
    comm_backend: str | type[CommBackend] | None = None,
    device: str | torch.device | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    pin_cpu: bool = False,
    reduce_dtype: ReduceDtype = DEFAULT_REDUCE_DTYPE,
    prefetch_bytes: int | None = None,
    gradients: GradientsOfRanks = DEFAULT_GRADIENTS,
    check_calls: bool | None = None,
    sequence_dim: int | None = None,
    shard_size: ShardSize | None = None,
    optimizer_shards: OptimizerShards | None = None,
    cp_size: int = 1,
    plugins: Sequence[object] = (),
) -> None:
    """Start bmt in this process; collective over all processes that the launcher started.

    Rank, world size and rendezvous come from the variables of torchrun, of Slurm's ``srun`` or of
    Open MPI's ``mpirun``: see :mod:`bmt_core.launch`. Without any it is a run of one rank. The
    fields of :class:`RunSettings` have the details.

    - ``init_method``: torch's address of the rendezvous; ``"env://"`` reads the launcher's.
    - ``seed``: every rank seeds torch, ``random`` and numpy with it.
    - ``pipe_size``: number of pipeline stages; -1 means no pipeline.
    - ``num_micro_batches``: into how many micro-batches a pipelined list divides a batch.
    - ``tp_size``: over how many ranks tensor-parallel layers are divided.
    - ``zero_level``: the default level of Blocks; None means 3.
    - ``axis_sizes``: sizes of axes of the grid that other plugins provide, such as ``{"ep": 2}``.
    - ``comm_backend``: a registered name, or a :class:`CommBackend` class; by default the
      environment's ``BMT_COMM_BACKEND``, else ``"torch"``.
    - ``device``: by default the CUDA device of the local rank where there is one, else the CPU.
    - ``timeout``: seconds that bound every rendezvous and collective.
    - ``pin_cpu``: bind the process to its share of the host's cores.
    - ``reduce_dtype``: how Blocks sum half-precision gradients, see ``RunSettings.reduce_dtype``.
    - ``prefetch_bytes``: how many bytes of parameters may be gathered ahead of the running Block;
      at least one Block always is, and by default (None) only one.
    - ``gradients``: whether ``.grad`` is the ``"sum"`` over ranks or the ``"mean"`` over those that
      see different data, see ``RunSettings.gradients``.
    - ``check_calls``: whether ranks compare their collectives, see ``RunSettings.check_calls``.
    - ``sequence_dim``: the dim of activations that tensor-parallel layers divide: 0, 1, or None for
      0 with a warning where it may be either. See ``RunSettings.sequence_dim``.
    - ``shard_size``: over how many of the ranks that see different data everything is sharded;
      ``"host"`` for those of one host, None for all. See ``RunSettings.shard_size``.
    - ``optimizer_shards``: ``"all"`` shards gradients and states over all of them nevertheless,
      see ``RunSettings.optimizer_shards``.
    - ``cp_size``: over how many ranks each sequence is divided (bmt-cp); short for
      ``axis_sizes={"cp": cp_size}``.
    - ``plugins``: modules or objects with hook implementations, added to the installed plugins.

    Every rank must pass the same settings, except ``timeout``, ``pin_cpu`` and the index of the
    ``device``. Until :func:`shutdown`, an error that ends the program is printed without the calls
    inside of bmt and torch: see :mod:`bmt_core.run.uncaught_errors`.

    Raises :class:`ConfigError` (bad settings, other settings on other ranks, a world size that the
    grid does not divide, a second start) and :class:`PluginError` (broken or doubled plugins, other
    plugins on other ranks), on every rank.
    """
    if _current is not None:
        raise ConfigError(
            "bmt is initialised already. Call shutdown() before another init_distributed()."
        )

    def settings() -> RunSettings:
        return RunSettings(
            seed=seed,
            pipe_size=1 if pipe_size in (-1, None) else pipe_size,
            pipe_enabled=pipe_size not in (-1, None),
            num_micro_batches=num_micro_batches,
            tp_size=tp_size,
            axis_sizes=with_context_axis(axis_sizes, cp_size),
            zero_level=DEFAULT_ZERO_LEVEL if zero_level is None else zero_level,
            comm_backend=comm_backend or os.environ.get("BMT_COMM_BACKEND") or DEFAULT_COMM_BACKEND,
            device=device,
            timeout=timeout,
            pin_cpu=pin_cpu,
            reduce_dtype=reduce_dtype,
            prefetch_bytes=prefetch_bytes,
            gradients=gradients,
            check_calls=check_calls,
            sequence_dim=sequence_dim,
            shard_size=shard_size,
            optimizer_shards=optimizer_shards,
        )

    # A wrong timeout is refused with the other settings, when this rank can tell the others.
    bound = timeout if is_timeout(timeout) else DEFAULT_TIMEOUT
    _start(init_method, bound, settings, plugins)


def shutdown() -> None:
    """End the run on this process: tell plugins, close groups. Without a run it does nothing.

    Waits for nobody, so a rank that failed can leave. Another :func:`init_distributed` may follow.
    Inside of an ``except`` or ``finally`` block that handles an error, the rank leaves because of
    it, and the calls of all other ranks fail. After an error that is handled, call it behind
    the block.
    """
    error = _error_under_way()
    if _uncaught is not None and error is None:  # which is still to be printed
        _uncaught.remove()
    if _current is None:
        return
    runtime = _current
    atexit.unregister(shutdown)
    if error is not None:
        runtime.observer.announce(_text_of(error))
    # Runs all that it was given, in reverse order, even if something raises.
    with ExitStack() as last_first:
        last_first.callback(_disconnect, runtime)
        for callback in reversed(runtime.at_shutdown):
            last_first.callback(callback)
        runtime.registry.run_stopping(runtime)


def _disconnect(runtime: Runtime) -> None:
    global _current
    _current = None
    _leave(runtime.observer)  # before the connections close: the others know why
    runtime.backend.close()


def _leave(watch: RunObserver) -> None:
    watch.leave(_text_of(_error_under_way()))


def current() -> Runtime:
    """Return the running :class:`Runtime`, or raise :class:`NotInitializedError`
    (a ``RuntimeError``).
    """
    if _current is None:
        raise NotInitializedError("bmt is not initialised. Call init_distributed() first.")
    return _current


def is_initialized() -> bool:
    """Whether :func:`init_distributed` has been called and :func:`shutdown` has not."""
    return _current is not None


def world_group() -> Group:
    """Return the group of all ranks; before ``init_distributed()`` the group of this
    process alone.
    """
    return current().world if is_initialized() else SingleGroup(0)


def world_size() -> int:
    """Number of ranks; 1 before initialisation."""
    return _current.world_size if _current is not None else 1


def rank() -> int:
    """This rank; 0 before initialisation."""
    return _current.rank if _current is not None else 0


def synchronize() -> None:
    """Return when host and device of every rank have reached this point. Collective."""
    runtime = current()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    runtime.world.all_reduce(torch.zeros(1, device=runtime.device)).wait()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)


def _start(
    init_method: str,
    timeout: float,
    asked: Callable[[], RunSettings],
    plugins: Sequence[object],
) -> None:
    """Start the run in sections. An error in one of them is raised on all ranks at its end."""
    global _current, _starts, _uncaught
    launch = Launch.from_env()
    uncaught = _uncaught = UncaughtErrors(launch.rank, launch.world_size)
    store = rendezvous_store(init_method, launch, _starts, timeout)
    _starts += 1
    uncaught.store = store
    section = partial(
        start_section, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
    with section("settings and plugins", judge=check_reports) as reports:
        settings = asked()
        chosen = _choose_device(settings, launch)
        registry = Registry.load(plugins=plugins)
        axes = registry.mesh_axes(settings)
        compared = _compared(settings, chosen, axes, launch)
        reports.own = RankReport.of(registry, compared).to_plain()
    with section("choices", judge=hosts_of) as reports:
        check_axes_are_provided(settings, axes)
        check_axis_sizes(settings.axis_sizes, axes)
        sizes = _sizes(settings, axes, launch)
        backend_class = _choose_backend(settings, registry)
        kernels = choose_kernels(registry.kernel_providers, chosen)
        _ = registry.optimizers  # wrong offers stop the start here, and not a later create()
        reports.own = None if store is None else name_and_address()
    hosts = None if reports.found is None else Hosts(**reports.found)
    with ExitStack() as undo:
        # Before anybody waits for connections: the package may refuse the start.
        with section("observer"):
            observer = _observer(store, init_method, launch, settings, registry, hosts)
            undo.callback(_leave, observer)
            uncaught.has_run_failed = lambda: observer.failure is not None
        # In a section, because a rank that shuts down early would close connections that a slower
        # rank is still making. They are closed behind it, when the others know why.
        with section("connections"), uncaught.staying():
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            context = CommContext(
                rank=launch.rank,
                world_size=launch.world_size,
                local_rank=launch.local_rank,
                device=chosen,
                store=store,
                timeout=timeout,
                hosts=hosts,
            )
            backend: CommBackend = backend_class(context)
            undo.callback(backend.close)
            observer.on_failure(backend.abort)
            runtime = Runtime(
                settings=settings,
                launch=launch,
                device=chosen,
                registry=registry,
                topology=Topology(
                    sizes,
                    launch.rank,
                    backend,
                    wrapped=observer.observed,
                    **kinds_of_axes(axes),
                    over_replicas=settings.optimizer_shards is not None,
                ),
                backend=backend,
                kernels=kernels,
                observer=observer,
            )
            if settings.pin_cpu:
                _pin_cpu(launch)
            _seed(settings.seed)
        undo.pop_all()
    _current = runtime
    # For scripts that never call shutdown(): process groups that live until the interpreter exits
    # can abort it.
    atexit.register(shutdown)
    try:
        with section("plugins that are told"):
            registry.run_started(runtime)
    except BaseException:
        shutdown()
        raise
    if launch.rank == 0:
        print(runtime.describe(), flush=True)
        apart = separate_runs()
        if apart:
            warn_user(apart)


def _observer(
    store: dist.Store | None,
    init_method: str,
    launch: Launch,
    settings: RunSettings,
    registry: Registry,
    hosts: Hosts | None,
) -> RunObserver:
    PLACES.now = ""
    if store is None:
        return RunObserver()
    address = server_address(init_method, launch)
    context = ObserverContext(
        rank=launch.rank,
        world_size=launch.world_size,
        store=store,
        server="" if address is None else address[0],
        server_rank=None if launcher_serves_store() else 0,
        has_several_hosts=hosts is not None and hosts.are_several,
        timeout=settings.timeout,
        check_calls=settings.check_calls,
    )
    watch = only_one(registry.answers("bmt_run_observer", context=context))
    if address is not None:
        limit_silence(address[1], settings.timeout)  # of the connection that it has made
    return watch


def _error_under_way() -> BaseException | None:
    """Return the error that ends this process: the one being handled now, or the one that ended the
    program.
    """
    error = sys.exception() or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


def _text_of(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _choose_device(settings: RunSettings, launch: Launch) -> torch.device:
    asked = settings.device
    device = torch.device(
        asked if asked is not None else "cuda" if torch.cuda.is_available() else "cpu"
    )
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device must be cpu or cuda, not {asked!r}.")
    count = torch.cuda.device_count()
    index = launch.local_rank if device.index is None else device.index
    if device.index is None and count == 1 and launch.launcher in (SLURM, OPEN_MPI):
        # Each task sees a device of its own, as with srun --gpus-per-task=1. NCCL refuses a device
        # that two ranks share.
        index = 0
    if index >= count:
        raise ConfigError(
            f"Rank {launch.rank} needs CUDA device {index}, and this host has {count}."
            " Start at most one rank per device, or pass device='cpu'."
        )
    return torch.device("cuda", index)


def _compared(
    settings: RunSettings, device: torch.device, axes: Sequence[MeshAxis], launch: Launch
) -> dict[str, str]:
    """Return all that must be the same on every rank, besides the plugins: before groups connect,
    and with them collectives.
    """
    return {
        **common_settings(settings),
        **{f"the axis {axis.name!r}": repr(axis) for axis in axes},
        "ranks of the host": str(launch.local_world_size if settings.shard_size == "host" else ""),
        "the type of the device": device.type,
        KERNELS_VARIABLE: repr(os.environ.get(KERNELS_VARIABLE, "")),
        "torch": torch.version.__version__,
    }


def _sizes(settings: RunSettings, axes: Sequence[MeshAxis], launch: Launch) -> dict[str, int]:
    size = settings.shard_size
    if size == "host":
        size = data_ranks_of_host(axes, launch.world_size, launch.local_world_size)
    return grid_sizes(axes, launch.world_size, size)


def _choose_backend(settings: RunSettings, registry: Registry) -> type[CommBackend]:
    asked = settings.comm_backend
    chosen = registry.find("comm backend", asked) if isinstance(asked, str) else asked
    if not (isinstance(chosen, type) and issubclass(chosen, CommBackend)):
        raise ConfigError(
            f"comm_backend must be a name or a subclass of CommBackend, not {chosen!r}."
        )
    return chosen


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ModuleNotFoundError:
        return
    numpy.random.seed(seed % 2**32)


def _pin_cpu(launch: Launch) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            f"pin_cpu needs an operating system with CPU affinity, and {sys.platform} has none."
        )
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // launch.local_world_size)
    first = launch.local_rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])
