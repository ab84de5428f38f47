"""``Launch``: this process's place among those that ``torchrun``, Slurm or Open MPI started, and
where they meet.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from bmt_core.errors import ConfigError

ONE_PROCESS = "none"
TORCHRUN = "torchrun"
BY_HAND = "RANK and WORLD_SIZE"
OPEN_MPI = "Open MPI"
SLURM = "Slurm"
_THIS_HOST = "127.0.0.1"
# Below the ports that Linux gives to outgoing connections (32768 and above).
_FIRST_PORT, _PORTS = 10_000, 20_000

OTHER_LAUNCHERS: tuple[tuple[str, str, str | None], ...] = (
    ("an MPI launcher", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH2's launcher", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("PMIx's launcher", "PMIX_RANK", None),
)
"""Launchers whose processes are refused, and their variables for the rank and, if there is one, the
number of processes.
"""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The ranks and sizes that the launcher (``torchrun``, for example) gave this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = ONE_PROCESS
    """Whose variables they are: ``torchrun``, ``RANK and WORLD_SIZE`` (set by hand), ``Slurm``,
    ``Open MPI`` or ``none``.
    """

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read the variables of the launcher; without any it is a run of one rank.

        ``RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE`` come first, as torchrun or the user sets
        them; then Open MPI's ``OMPI_COMM_WORLD_RANK`` and so on; then those that Slurm's ``srun``
        gives its tasks. Raises :class:`ConfigError` for half of them, for values that are not
        numbers, for a rank outside the world, and where a launcher has started several processes
        without these variables, each of which would be a run of its own.

        >>> where = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        >>> launch = Launch.from_env({"RANK": "1", "WORLD_SIZE": "4", **where})
        >>> launch.rank, launch.local_world_size, launch.launcher
        (1, 4, 'RANK and WORLD_SIZE')
        >>> Launch.from_env({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
        Launch(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher='Slurm')
        """
        environ = os.environ if environ is None else environ
        if "RANK" in environ:
            return _of_torchrun(environ)
        launch = _of_open_mpi(environ)
        if launch is None:
            _check_no_other_launcher(environ)
            launch = _of_slurm(environ)
        if launch is None and "WORLD_SIZE" in environ:
            raise _not_set("RANK")
        launch = launch or cls()
        _check_same_world_size(environ, launch)
        return launch


def rendezvous_address(launch: Launch, environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return host and port of the ``env://`` rendezvous: ``MASTER_ADDR`` and ``MASTER_PORT``, or
    what the launcher tells of them.

    Slurm tells both: the first host of the step, and a port that follows from the numbers of job
    and step. Open MPI tells a port, and the host if there is only one. Raises :class:`ConfigError`
    for what is not known.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    >>> step["SLURM_TASKS_PER_NODE"] = "1(x2)"
    >>> step |= {"SLURM_JOB_NODELIST": "gpu[008-009]", "SLURM_NODEID": "0"}
    >>> rendezvous_address(Launch.from_env(step), step)
    ('gpu008', 26996)
    """
    environ = os.environ if environ is None else environ
    host = environ.get("MASTER_ADDR") or _known_host(launch, environ)
    port = (
        _integer(environ, "MASTER_PORT")
        if environ.get("MASTER_PORT")
        else _known_port(launch, environ)
    )
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError(f"MASTER_PORT must be a port, below {2**16}, not {port}.")
    missing = [
        name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None
    ]
    if host is None or port is None:
        remedy = {
            OPEN_MPI: (
                "Set the host of rank 0 and a free port: mpirun -x MASTER_ADDR=HOST -x"
                " MASTER_PORT=29500 ..."
            ),
            SLURM: "Set the host of rank 0 before srun.",
        }.get(launch.launcher, "Start with torchrun, which sets them, or set them.")
        raise ConfigError(
            f"{' and '.join(missing)} must be set when WORLD_SIZE is above 1. {remedy}"
        )
    return host, port


def separate_runs(environ: Mapping[str, str] | None = None) -> str:
    """Return a warning if ``srun`` has started several torchruns, and this one has not joined all
    of them; "" otherwise.

    >>> environment = {"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}
    >>> "torchrun has joined 1 of them" in separate_runs(environment)
    True
    """
    environ = os.environ if environ is None else environ
    tasks, joined = (
        _integer(environ, "SLURM_STEP_NUM_TASKS", 1),
        _integer(environ, "GROUP_WORLD_SIZE", 1),
    )
    if "GROUP_WORLD_SIZE" not in environ or joined >= tasks:
        return ""
    return (
        f"Slurm has started {tasks} tasks, and torchrun has joined {joined} of them to this run:"
        " the others train models of their own. For one run, start every torchrun with --nnodes"
        f" {tasks} --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or no torchrun but srun"
        " python train.py."
    )


def _of_torchrun(environ: Mapping[str, str]) -> Launch:
    launcher = TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else BY_HAND
    return _read(environ, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _of_open_mpi(environ: Mapping[str, str]) -> Launch | None:
    # Asked before Slurm: where mpirun starts its daemons by srun, Slurm counts the daemons and not
    # the ranks.
    names = [f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _read(environ, OPEN_MPI, *names) if names[0] in environ or names[1] in environ else None


def _of_slurm(environ: Mapping[str, str]) -> Launch | None:
    size_name = _slurm_size_name(environ)
    if environ.get("SLURM_PROCID", "0") == "0" and size_name not in environ:
        return None  # the batch script of a job without --ntasks
    if "SLURM_PROCID" not in environ:
        return None  # a login shell or salloc's: no task of a step
    world_size = _integer(environ, size_name)
    if world_size > 1 and _is_batch_script(environ):
        raise ConfigError(
            f"{size_name} is {world_size}, and the batch script of this Slurm job has started one"
            " process without srun. Write srun python train.py in the script, which starts all"
            " tasks, or torchrun, or SLURM_NTASKS=1 python train.py for a run of one process."
        )
    local_size = {"tasks of this node": str(_tasks_of_this_node(environ, world_size))}
    return _read(
        {**environ, **local_size}, SLURM, "SLURM_PROCID", size_name, "SLURM_LOCALID", *local_size
    )


def _read(
    environ: Mapping[str, str],
    launcher: str,
    rank_name: str,
    size_name: str,
    local_rank_name: str,
    local_size_name: str,
) -> Launch:
    rank, world_size = _integer(environ, rank_name), _integer(environ, size_name)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{rank_name}={rank} is outside of {size_name}={world_size}. Check the launcher."
        )
    local_world_size = _integer(environ, local_size_name, default=world_size)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, local_rank_name, default=rank % max(local_world_size, 1)),
        local_world_size=local_world_size,
        launcher=launcher,
    )


def _tasks_of_this_node(environ: Mapping[str, str], world_size: int) -> int:
    text = (
        environ.get("SLURM_STEP_TASKS_PER_NODE")
        or environ.get("SLURM_TASKS_PER_NODE")
        or str(world_size)
    )
    tasks, node = tasks_per_node(text), _integer(environ, "SLURM_NODEID", default=0)
    if not 0 <= node < len(tasks):
        raise ConfigError(
            f"SLURM_NODEID={node} is outside of the {len(tasks)} nodes of"
            f" SLURM_TASKS_PER_NODE={text!r}."
        )
    return tasks[node]


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, which Slurm writes in short.

    >>> tasks_per_node("4(x2),3")
    [4, 4, 3]
    """
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"SLURM_TASKS_PER_NODE must be like 4(x2),3 and is {text!r}.")
    return [int(each[1]) for each in found if each for _ in range(int(each[2] or 1))]


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of hosts.

    >>> first_host("rack[0-1]n[008-011,20],login")
    'rack0n008'
    >>> first_host("alone")
    'alone'
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0]) if match else ""


def _known_host(launch: Launch, environ: Mapping[str, str]) -> str | None:
    if launch.launcher not in (SLURM, OPEN_MPI):
        return None
    if launch.local_world_size == launch.world_size:
        return _THIS_HOST
    nodes = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
    )
    # Open MPI's ranks may lie on other hosts than those of the Slurm step that started them.
    return first_host(nodes) if nodes and launch.launcher == SLURM else None


def _known_port(launch: Launch, environ: Mapping[str, str]) -> int | None:
    """Return the same port on every rank, and most likely another one for another run."""
    if launch.launcher == SLURM:
        name = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    elif launch.launcher == OPEN_MPI:
        name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
        if not name:
            return None
    else:
        return None
    return _FIRST_PORT + zlib.crc32(name.encode()) % _PORTS


def _check_same_world_size(environ: Mapping[str, str], launch: Launch) -> None:
    given = _integer(environ, "WORLD_SIZE", default=launch.world_size)
    if given != launch.world_size:
        raise ConfigError(
            f"WORLD_SIZE is {given}, and {launch.launcher} has started {launch.world_size} tasks."
            " Unset WORLD_SIZE, or set RANK too."
        )


def _check_no_other_launcher(environ: Mapping[str, str]) -> None:
    """Refuse a process that a launcher started whose variables are not read, unless Slurm says the
    same of it.
    """
    of_slurm = _slurm_rank_and_size(environ)
    for launcher, rank_name, size_name in OTHER_LAUNCHERS:
        rank, size = environ.get(rank_name), environ.get(size_name) if size_name else None
        if (
            rank is None
            or size == "1"
            or (of_slurm and rank == of_slurm[0] and size in (None, of_slurm[1]))
        ):
            continue
        given = (
            f"{rank_name}={rank}" if size is None else f"{rank_name}={rank} and {size_name}={size}"
        )
        raise ConfigError(
            f"{given}: {launcher} has started {size or 'several'} processes, and each would be a"
            " run of its own. bmt reads the variables of torchrun, of Slurm (srun) and of Open MPI"
            " (mpirun). Start with one of these, or set RANK, WORLD_SIZE, LOCAL_RANK,"
            " LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If this process is alone,"
            f" unset {rank_name}."
        )


def _slurm_rank_and_size(environ: Mapping[str, str]) -> tuple[str, str | None] | None:
    """Return what Slurm says of this task of a step; None if it is no such task."""
    if "SLURM_PROCID" not in environ or _is_batch_script(environ):
        return None
    return environ["SLURM_PROCID"], environ.get(_slurm_size_name(environ))


def _slurm_size_name(environ: Mapping[str, str]) -> str:
    # Inside a step SLURM_NTASKS may be that of the job; SLURM_STEP_NUM_TASKS is always that of
    # the step.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    return environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise _not_set(name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be an integer, not {text!r}.") from None


def _not_set(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is not set although the launcher set others. Start with torchrun, or unset RANK"
        " and WORLD_SIZE."
    )
