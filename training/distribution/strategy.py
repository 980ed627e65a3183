"""Devices that train: all GPUs, logical CPU devices, or those of several processes; their steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import tensorflow as tf
from pydantic import BaseModel, Field, ValidationError

# TensorFlow has no public name for these.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from conf.errors import ConfigError, InputDataError, InternalError
from conf.training.train import PARAMETER_SERVER_FIX, DevicesConfig, TrainConfig
from training.input.batches import ARRIVALS, SWAPS, Batch

VARIABLE = "TF_CONFIG"
WORKER = "worker"
TF_CONFIG_EXAMPLE = (
    '{"cluster": {"worker": ["host0:port", "host1:port"]}, "task": {"type": "worker", "index": 0}}'
)
_MILLISECONDS = 1000


@dataclass(frozen=True)
class Cluster:
    """`host:port` of all workers, the chief first, and the number of this process."""

    workers: tuple[str, ...]
    index: int


class _Job(BaseModel, extra="forbid"):
    worker: list[Annotated[str, Field(pattern=r"^.+:[0-9]{1,5}$")]] = Field(min_length=1)


class _Task(BaseModel, strict=True):
    type: Literal["worker"]
    index: int = Field(ge=0)


class _TFConfig(BaseModel):
    cluster: _Job
    task: _Task


def read_cluster() -> Cluster:
    """Reads the cluster of a multi-worker run from `TF_CONFIG`."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = _TFConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise _refuse(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", text) from error
    workers, index = found.cluster.worker, found.task.index
    if index >= len(workers):
        raise _refuse(f"task.index: there are {len(workers)} workers", text)
    return Cluster(tuple(workers), index)


def _refuse(why: str, text: str) -> ConfigError:
    return ConfigError(
        f"devices.strategy=multi_worker: the environment variable {VARIABLE} does not fit ({why})",
        received=text or "nothing",
        allowed=TF_CONFIG_EXAMPLE,
        fix=PARAMETER_SERVER_FIX
        if '"ps"' in text
        else f"set {VARIABLE} in each process, or start them by --launcher spark; for one process "
        "set devices.strategy=auto",
    )


def build_strategy(config: DevicesConfig) -> tf.distribute.Strategy:
    """Returns the strategy for this machine, or this process's part of one for several.

    One device has TensorFlow's default one, which does not mirror. Several processes wait for
    each other here; one worker alone trains as with `auto`, so that a run may go on with fewer.
    """
    if config.strategy == "multi_worker" and len((cluster := read_cluster()).workers) > 1:
        return _join(cluster, config.worker_timeout_s)
    if has_gpu():
        names = [device.name for device in tf.config.list_logical_devices("GPU")]
    else:
        names = _cpu_devices(config.cpu_replicas)
    if config.strategy == "none" or (config.strategy != "mirrored" and len(names) == 1):
        return tf.distribute.get_strategy()
    return _mirror(tuple(names))


def has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def use_tf32(is_allowed: bool) -> None:
    """Says whether GPUs may round what they multiply to TF32, in this process."""
    tf.config.experimental.enable_tensor_float_32_execution(is_allowed)


def count_replicas() -> int:
    """Returns how many replicas run the step; 1 outside of a strategy."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else int(context.num_replicas_in_sync)


def on_host() -> AbstractContextManager[Any]:
    """Computes a block where shapes and seeds are read: a GPU would be asked for each number."""
    return tf.device("CPU:0") if has_gpu() else nullcontext()


@functools.cache
def _mirror(names: tuple[str, ...]) -> tf.distribute.Strategy:
    """Cached: a second one would number its collectives from the start, as the first one did."""
    return tf.distribute.MirroredStrategy(names)


@functools.cache
def _join(cluster: Cluster, timeout_s: int) -> tf.distribute.Strategy:
    """Cached: the server of a process cannot be started twice."""
    try:
        _configure_heartbeat(cluster, timeout_s)
        kinds = tf.distribute.experimental.CommunicationImplementation
        kind = kinds.NCCL if has_gpu() else kinds.AUTO
        options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
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


def _configure_heartbeat(cluster: Cluster, timeout_s: int) -> None:
    """Sets how long workers miss each other before they meet; by default ten seconds are all."""
    job = coordination_config_pb2.CoordinatedJob(name=WORKER, num_tasks=len(cluster.workers))
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{WORKER}/replica:0/task:0",
        heartbeat_timeout_in_ms=timeout_s * _MILLISECONDS,
        coordinated_jobs=[job],
    )


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


def describe_devices(strategy: tf.distribute.Strategy, batch_size: int) -> dict[str, Any]:
    """Returns this process's devices, and the replicas and rows of a step over all processes."""
    replicas, workers = strategy.num_replicas_in_sync, count_workers(strategy)
    device = "GPU" if has_gpu() else "CPU"
    kind, names = "none", [f"/device:{device}:0"]
    if workers > 1 or isinstance(strategy, tf.distribute.MirroredStrategy):
        kind = "multi_worker" if workers > 1 else "mirrored"
        names = [str(device) for device in strategy.extended.worker_devices]
    return {
        "strategy": kind,
        "workers": workers,
        "replicas": replicas,
        "devices": names,
        "batch_size": batch_size,
        "rows_per_replica": batch_size // replicas,
    }


def count_workers(strategy: tf.distribute.Strategy) -> int:
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    return len(strategy.cluster_resolver.cluster_spec().job_tasks("worker"))


def check_devices(config: TrainConfig, strategy: tf.distribute.Strategy) -> None:
    """Refuses a config whose steps the replicas of a strategy cannot share."""
    replicas, workers = strategy.num_replicas_in_sync, count_workers(strategy)
    parts, size = config.optimizer.accumulate_steps or 1, config.input.batch_size
    if size % (parts * replicas):
        raise ConfigError(
            "input.batch_size must be a multiple of optimizer.accumulate_steps times the number "
            "of replicas",
            received=f"{size} rows in {parts} parts on {replicas} replicas",
            allowed=f"multiples of {parts * replicas}",
        )
    if config.input.bucket_boundaries and replicas > 1:
        raise ConfigError(
            "input.bucket_boundaries works on one device: collectives between replicas need lists "
            "of one length in all batches",
            received=f"{replicas} replicas",
            fix="leave input.bucket_boundaries out, or train on one device",
        )
    tables = config.model.embeddings.items()
    sharded = [name for name, table in tables if table.kind == "dynamic" and table.shard]
    if sharded and replicas > workers > 1:
        raise ConfigError(
            f"model.embeddings.{sharded[0]}.shard=workers takes one device for each worker",
            received=f"{replicas} devices of {workers} workers",
            fix="start a worker for each GPU, with CUDA_VISIBLE_DEVICES set to its own",
        )


def distribute_batches(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Splits each global batch over the replicas, in order.

    Every process makes the whole batch and takes its replicas' rows: those of one process.
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
        return strategy.distribute_datasets_from_function(functools.partial(_take_rows, dataset))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


def _take_rows(dataset: tf.data.Dataset, own: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns each global batch as one batch per replica of a process."""
    replicas, worker = own.num_replicas_in_sync, own.input_pipeline_id
    local = replicas // own.num_input_pipelines

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


class StepsResult(NamedTuple):
    """Losses, float32 `[steps]`, of which the last two may not be finite; seconds of waiting.

    The seconds are an upper bound: waiting overlaps with the end of the step before.
    """

    losses: tf.Tensor
    wait_s: tf.Tensor


StepFunction = Callable[[Batch], tf.Tensor]
RunSteps = Callable[[Any, tf.Tensor], StepsResult]


def compile_steps(strategy: tf.distribute.Strategy, train_step: StepFunction) -> RunSteps:
    """Returns the compiled steps; they stop one step after the first whose loss is not finite.

    A step is begun before the loss of the one before is known: a GPU waits for none of them.
    """
    # A strategy of several devices fetches to each of them; a CPU has the batches already.
    if strategy is tf.distribute.get_strategy() and has_gpu():
        return build_prefetching_steps(train_step, "GPU:0")
    return build_run_steps(strategy, train_step)


def build_run_steps(strategy: tf.distribute.Strategy, train_step: StepFunction) -> RunSteps:
    """Returns the function of `compile_steps` that runs one replica's step on all replicas."""

    # The loop below needs AutoGraph; a step has no Python control flow on tensors.
    step = tf.autograph.experimental.do_not_convert(train_step)

    def run_steps(iterator: Any, steps: tf.Tensor) -> StepsResult:
        losses = tf.TensorArray(tf.float32, size=steps, element_shape=[])
        wait_s = tf.constant(0.0, tf.float64)
        done, loss, before = tf.constant(0), tf.constant(0.0), tf.constant(0.0)
        while tf.logical_and(done < steps, tf.math.is_finite(before)):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            before = loss
            with tf.control_dependencies([loss]):
                asked = tf.timestamp()
            with tf.control_dependencies([asked]):
                batch = next(iterator)
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                arrived = tf.timestamp()
            wait_s += arrived - asked
            # One thread would compute the step first, and look at the clock when it is done.
            with tf.control_dependencies([arrived]):
                shares = strategy.run(step, args=(batch,))
            loss = strategy.reduce(tf.distribute.ReduceOp.SUM, shares, axis=None)
            losses = losses.write(done, loss)
            done += 1
        return StepsResult(losses.stack()[:done], wait_s)

    return tf.function(run_steps, reduce_retracing=True)


def build_prefetching_steps(train_step: StepFunction, device: str) -> RunSteps:
    """Returns the function of `compile_steps`, with the next batch under way during each step.

    TensorFlow's own `prefetch_to_device` takes no ragged or sparse tensors.
    """
    step = tf.autograph.experimental.do_not_convert(train_step)
    fetch = tf.autograph.experimental.do_not_convert(_fetch_batch)

    def run_steps(iterator: Any, steps: tf.Tensor) -> StepsResult:
        losses = tf.TensorArray(tf.float32, size=steps, element_shape=[])
        done, loss, before = tf.constant(0), tf.constant(0.0), tf.constant(0.0)
        finished = tf.timestamp()
        with tf.control_dependencies([finished]):
            batch = fetch(iterator, device)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            wait_s = tf.timestamp() - finished
        while tf.logical_and(done < steps, tf.math.is_finite(before)):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            before = loss
            # Nothing of the step depends on what is fetched here: both go on side by side.
            following = batch
            if done + 1 < steps:
                following = fetch(iterator, device)
            with tf.control_dependencies(tf.nest.flatten(following, expand_composites=True)):
                arrived = tf.timestamp()
            loss = tf.ensure_shape(step(batch), [])
            with tf.control_dependencies([loss]):
                finished = tf.timestamp()
            wait_s += tf.maximum(arrived - finished, 0.0)
            losses = losses.write(done, loss)
            batch = following
            done += 1
        return StepsResult(losses.stack()[:done], wait_s)

    return tf.function(run_steps, reduce_retracing=True)


def _fetch_batch(iterator: Any, device: str) -> Batch:
    """Returns the next batch; what the host reads stays there: text, counts, swaps of rows."""

    def bring(part: Any, name: str = "") -> Any:
        if isinstance(part, Mapping):
            return {key: bring(inner, key) for key, inner in part.items()}
        return part if name == SWAPS else tf.nest.map_structure(copy, part, expand_composites=True)

    def copy(part: tf.Tensor) -> tf.Tensor:
        return part if part.dtype == tf.string or part.shape.rank == 0 else tf.identity(part)

    batch = next(iterator)
    with tf.device(device):
        return bring(batch)
