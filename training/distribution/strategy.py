"""Devices that train: all GPUs, logical CPU devices, or those of several processes."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

# TensorFlow has no public name for these.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from conf.errors import ConfigError, InputDataError, InternalError
from conf.training.train import DevicesConfig
from training.distribution.cluster import WORKER, Cluster, read_cluster
from training.input.batches import ARRIVALS, Batch

MILLISECONDS = 1000


def configure_heartbeat(cluster: Cluster, timeout_s: int) -> None:
    """Sets the time-out of the service by which workers watch each other; before they meet.

    By default ten seconds are all that a start may take.

    Args:
        cluster: The workers; the first one runs the service.
        timeout_s: Seconds without a sign of life after which a worker is lost.
    """
    job = coordination_config_pb2.CoordinatedJob(name=WORKER, num_tasks=len(cluster.workers))
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{WORKER}/replica:0/task:0",
        heartbeat_timeout_in_ms=timeout_s * MILLISECONDS,
        coordinated_jobs=[job],
    )


def build_strategy(config: DevicesConfig) -> tf.distribute.Strategy:
    """Returns the strategy for this machine, or this process's part of one for several.

    One device needs no strategy: TensorFlow's default one does the same steps without the cost
    of mirroring. With several processes it returns once all of them have come; one worker alone
    trains as with `auto`, so that a run may go on with fewer.

    Args:
        config: The kind of strategy, and how many replicas to run where there is no GPU.

    Raises:
        ConfigError: TensorFlow has started with fewer logical devices than are asked for, or
            `TF_CONFIG` does not name the processes.
    """
    if config.strategy == "multi_worker" and len((cluster := read_cluster()).workers) > 1:
        return _join(cluster, config.worker_timeout_s)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        for gpu in gpus:
            _allow_growth(gpu)
        names = [device.name for device in tf.config.list_logical_devices("GPU")]
    else:
        names = _cpu_devices(config.cpu_replicas)
    if config.strategy == "none" or (config.strategy != "mirrored" and len(names) == 1):
        return tf.distribute.get_strategy()
    return _mirror(tuple(names))


@dataclass(frozen=True)
class Devices:
    """The devices that a run computes on.

    Attributes:
        strategy: `none`, `mirrored` or `multi_worker`.
        workers: Processes that compute steps.
        replicas: Devices that compute a step together, of all processes; each computes its share
            of a batch.
        devices: Names of this process's devices.
        batch_size: Rows of a step over all replicas.
    """

    strategy: str
    workers: int
    replicas: int
    devices: tuple[str, ...]
    batch_size: int

    def render(self) -> str:
        """Returns the description in words."""
        processes = f" in {self.workers} processes" if self.workers > 1 else ""
        share = self.batch_size // self.replicas
        return (
            f"{self.replicas} device(s){processes} (strategy {self.strategy}), "
            f"global batch of {self.batch_size:,} rows, {share:,} per replica"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the description for the run card."""
        return {**asdict(self), "rows_per_replica": self.batch_size // self.replicas}


def describe_devices(strategy: tf.distribute.Strategy, batch_size: int) -> Devices:
    """Returns what a strategy computes on.

    Args:
        strategy: The strategy.
        batch_size: Rows of a step over all replicas.
    """
    replicas, workers = strategy.num_replicas_in_sync, count_workers(strategy)
    kind, names = "none", [f"/device:{_kind_of_device()}:0"]
    if workers > 1 or isinstance(strategy, tf.distribute.MirroredStrategy):
        kind = "multi_worker" if workers > 1 else "mirrored"
        names = [str(device) for device in strategy.extended.worker_devices]
    return Devices(kind, workers, replicas, tuple(names), batch_size)


def plan_devices(config: DevicesConfig, batch_size: int) -> tuple[tf.distribute.Strategy, Devices]:
    """Returns a strategy to plan a run with, which waits for no other process, and the devices.

    Raises:
        ConfigError: As for `build_strategy`, or the processes cannot share a batch evenly.
    """
    workers = len(read_cluster().workers) if config.strategy == "multi_worker" else 1
    if workers == 1:
        strategy = build_strategy(config)
        return strategy, describe_devices(strategy, batch_size)
    kind = _kind_of_device()
    local = max(1, len(tf.config.list_physical_devices(kind)))
    check_replicas(batch_size, workers * local)
    names = tuple(f"/device:{kind}:{number}" for number in range(local))
    devices = Devices("multi_worker", workers, workers * local, names, batch_size)
    return tf.distribute.get_strategy(), devices


def count_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns how many processes train with a strategy, step by step together."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    return len(strategy.cluster_resolver.cluster_spec().job_tasks("worker"))


def check_batch_size(batch_size: int, strategy: tf.distribute.Strategy) -> None:
    """Refuses a batch that replicas cannot share evenly.

    Raises:
        ConfigError: The batch size is not a multiple of the number of replicas.
    """
    check_replicas(batch_size, strategy.num_replicas_in_sync)


def check_replicas(batch_size: int, replicas: int) -> None:
    """As `check_batch_size`, for a number of replicas."""
    below = batch_size - batch_size % replicas
    if batch_size != below:
        raise ConfigError(
            "input.batch_size must be a multiple of the number of replicas",
            received=f"{batch_size} rows on {replicas} replicas",
            allowed=" or ".join(str(size) for size in (below, below + replicas) if size),
        )


def distribute_batches(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Splits each global batch over the replicas, in order.

    Every process makes the whole batch and takes its replicas' rows, so that a step trains on the
    rows, in the order, of one process, whatever the number of processes.

    Raises:
        InputDataError: A list has no bounded length.
    """
    if strategy.num_replicas_in_sync == 1:
        return dataset
    unbounded = [
        name for name, spec in dataset.element_spec.items() if isinstance(spec, tf.RaggedTensorSpec)
    ]
    if unbounded:
        raise InputDataError(
            "several replicas need lists of a bounded length",
            received=f"{', '.join(unbounded)}: no max_len, and no statistics of its length",
            fix="set the feature's max_len and build the dataset again, or train on one device",
        )
    if count_workers(strategy) > 1 or ARRIVALS in dataset.element_spec:
        return strategy.distribute_datasets_from_function(
            lambda context: _take_rows(
                dataset,
                context.num_replicas_in_sync,
                context.input_pipeline_id,
                context.num_input_pipelines,
            )
        )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


@functools.cache
def _mirror(names: tuple[str, ...]) -> tf.distribute.Strategy:
    """One strategy per process and set of devices.

    Each new MirroredStrategy numbers its collectives from the start again, and the runtime
    confuses them with those of the one before.
    """
    return tf.distribute.MirroredStrategy(names)


@functools.cache
def _join(cluster: Cluster, timeout_s: int) -> tf.distribute.Strategy:
    """One strategy per process: its server cannot be started twice."""
    for gpu in tf.config.list_physical_devices("GPU"):
        _allow_growth(gpu)
    try:
        configure_heartbeat(cluster, timeout_s)
        return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.OpError as error:
        raise InternalError(
            "the workers did not come together",
            received=f"worker {cluster.index} of {len(cluster.workers)}, "
            f"{cluster.workers[cluster.index]}: {str(error).splitlines()[0]}",
            fix="start all workers, with the same list of them, within "
            f"devices.worker_timeout_s = {timeout_s} seconds; each must reach the others' ports",
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            "TensorFlow has already started in this process",
            received=str(error).splitlines()[0],
            fix="train with several workers in fresh processes",
        ) from error


def _take_rows(
    dataset: tf.data.Dataset, replicas: int, worker: int, workers: int
) -> tf.data.Dataset:
    """Returns each global batch as one batch per replica of a process."""
    local = replicas // workers

    def cut(batch: Batch) -> tf.data.Dataset:
        parts = [
            {
                # What is new in a table is so on all replicas.
                name: value if name == ARRIVALS else _cut(value, replicas, worker * local + part)
                for name, value in batch.items()
            }
            for part in range(local)
        ]
        found = tf.data.Dataset.from_tensors(parts[0])
        for part in parts[1:]:
            found = found.concatenate(tf.data.Dataset.from_tensors(part))
        return found

    return dataset.flat_map(cut).prefetch(local)


def _cut(value: Any, parts: int, part: int) -> Any:
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.split(value, parts, axis=0)[part]
    return tf.split(value, parts, axis=0)[part]


def _kind_of_device() -> str:
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def _allow_growth(gpu: tf.config.PhysicalDevice) -> None:
    if tf.config.get_logical_device_configuration(gpu) is not None:
        return  # Logical GPUs have fixed shares of its memory, which cannot grow.
    try:
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        return  # TensorFlow has started already: its memory setting stands.


def _cpu_devices(replicas: int) -> list[str]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if len(configured) < replicas and replicas > 1:
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
            )
        except RuntimeError as error:
            raise ConfigError(
                "TensorFlow has already started with fewer CPU devices in this process",
                received=f"devices.cpu_replicas = {replicas}",
                allowed=f"at most {max(1, len(configured))}",
                fix="train in a fresh process, or set devices.cpu_replicas accordingly",
            ) from error
    return [device.name for device in tf.config.list_logical_devices("CPU")[:replicas]]
