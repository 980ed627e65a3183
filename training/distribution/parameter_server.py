"""Parameter servers: how chief, workers and servers come together, serve, and learn of the end."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import tensorflow as tf

from conf.errors import ConfigError, ExitCode, InternalError, SluiceError
from training.distribution.cluster import (
    SERVER,
    ServerCluster,
    find_silent,
    is_listening,
    read_server_cluster,
)
from training.distribution.tensorflow_runtime import describe_error

END_QUEUE = "sluice_run_ended"
POLL_S = 0.5

_log = logging.getLogger("sluice.training.parameter_server")


class ParameterServers(tf.distribute.ParameterServerStrategy):
    """TensorFlow's strategy, which knows its processes.

    Args:
        cluster: The processes.
        timeout_s: Seconds without a sign of life after which one of them is taken for dead.
    """

    def __init__(self, cluster: ServerCluster, timeout_s: int) -> None:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.to_jobs()),
            task_type=cluster.job,
            task_id=cluster.index,
            rpc_layer="grpc",
        )
        super().__init__(resolver)
        self.cluster = cluster
        self.timeout_s = timeout_s


@functools.cache
def connect_servers(timeout_s: int) -> ParameterServers:
    """Returns the strategy of the chief once all processes of `TF_CONFIG` have come.

    One per process: TensorFlow can join a cluster once.

    Args:
        timeout_s: Seconds that they may come late.

    Raises:
        ConfigError: `TF_CONFIG` does not name the processes, or TensorFlow has started already.
        InternalError: A process has not come.
    """
    cluster = read_server_cluster()
    _await((*cluster.servers, *cluster.workers), timeout_s)
    tf.get_logger().addFilter(ShortMessages())
    try:
        tf.config.set_visible_devices([], "GPU")  # The chief computes no step.
        return ParameterServers(cluster, timeout_s)
    except RuntimeError as error:
        raise ConfigError(
            "TensorFlow has already started in this process",
            received=describe_error(error),
            fix="train with parameter servers in fresh processes",
        ) from error


class ShortMessages(logging.Filter):
    """Tells the first line of TensorFlow's messages of a lost process, once, in our own log."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Takes a message over; returns False."""
        before, self._last = self._last, (record.getMessage().splitlines() or [""])[0]
        if self._last != before:
            _log.log(record.levelno, "%s", self._last)
        return False


def _await(addresses: tuple[str, ...], timeout_s: int) -> None:
    """Waits for processes: TensorFlow itself would wait for ever, and not say for whom."""
    deadline = time.monotonic() + timeout_s
    missing = find_silent(addresses)
    while missing:
        if time.monotonic() > deadline:
            raise InternalError(
                "the workers and parameter servers did not come together",
                received=f"nobody listens on {', '.join(missing)}",
                fix="start all processes, with the same list of them, within "
                f"devices.worker_timeout_s = {timeout_s} seconds; the chief must reach their ports",
            )
        time.sleep(POLL_S)
        missing = find_silent(missing)


@contextmanager
def released_servers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Tells workers and parameter servers how the block ended, so that they end too.

    Without parameter servers it does nothing.

    Raises:
        InternalError: A parameter server, or all workers, have ended or cannot be reached.
    """
    if not isinstance(strategy, ParameterServers):
        yield
        return
    code = ExitCode.FAILED
    try:
        yield
        code = ExitCode.OK
    except SluiceError as error:
        code = error.exit_code
        raise
    except tf.errors.OpError as error:
        raise build_lost_error(strategy.cluster, describe_error(error)) from error
    finally:
        _send_end(strategy.cluster, code)


def build_lost_error(cluster: ServerCluster, received: str) -> InternalError:
    """Returns the error of a run that has lost a process which it cannot go on without."""
    silent = find_silent((*cluster.servers, *cluster.workers))
    jobs = cluster.to_jobs()
    names = [
        f"{job} {addresses.index(address)} ({address})"
        for job, addresses in jobs.items()
        for address in silent
        if address in addresses
    ]
    return InternalError(
        "training ended, as another of its processes ended or cannot be reached",
        received=f"{', '.join(names) or 'all processes answer by now'}: {received}",
        fix="see what that process says, then start all of them again with --resume",
    )


def _send_end(cluster: ServerCluster, code: int) -> None:
    """Puts the exit code into a queue on each process, which looks into it."""
    for job, addresses in cluster.to_jobs().items():
        for index, address in enumerate(addresses):
            if address == cluster.chief or not is_listening(address):
                continue
            # A process that has restarted, or just ends, is not reached: it finds out.
            with suppress(tf.errors.OpError), tf.device(f"/job:{job}/task:{index}/device:CPU:0"):
                queue = tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.int32], shapes=[[]], shared_name=END_QUEUE
                )
                tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(int(code))])


_RESUMABLE = (ExitCode.TERMINATED, ExitCode.INTERRUPTED)


def serve_chief(cluster: ServerCluster, timeout_s: int, tell: Callable[[str], None]) -> int:
    """Serves the chief of a run, and returns the exit code that the process ends with.

    Args:
        cluster: The processes; this one is a worker or a parameter server.
        timeout_s: Seconds without a sign of life after which the chief is taken for dead.
        tell: Receives a message for each event.

    Returns:
        0 where the chief has trained; 143 or 130 where a signal ended it after it had saved.

    Raises:
        InternalError: The port is taken, the chief did not come, died, or failed.
    """
    server = _start(cluster)
    name = f"{cluster.job} {cluster.index}"
    tell(f"serving as {name} of the chief at {cluster.chief}")
    code = _await_end(cluster, server, timeout_s)
    if code == ExitCode.OK:
        tell(f"the chief is done: {name} ends")
    elif code in _RESUMABLE:
        tell(f"a signal ended the chief, its state is saved: {name} ends")
    else:
        raise InternalError(
            "the chief has failed",
            received=f"its exit code {code}",
            fix="see what it says, then start all processes again with --resume",
        )
    return code


def _start(cluster: ServerCluster) -> tf.distribute.Server:
    try:
        return tf.distribute.Server(
            tf.train.ClusterSpec(cluster.to_jobs()),
            job_name=cluster.job,
            task_index=cluster.index,
            protocol="grpc",
            config=_configure(cluster.job),
        )
    except tf.errors.OpError as error:
        raise InternalError(
            "the server of this process cannot be started",
            received=f"{cluster.to_jobs()[cluster.job][cluster.index]}: {error.message}",
            fix="end what listens on that port, or name another one in all processes",
        ) from error


def _configure(job: str) -> Any:
    """One GPU of a worker's, where there is one: a step is of one device."""
    config = tf.compat.v1.ConfigProto()
    if job == SERVER:
        config.device_count["GPU"] = 0
    elif tf.config.list_physical_devices("GPU"):
        config.gpu_options.visible_device_list = "0"
        config.gpu_options.allow_growth = True
    return config


def _await_end(cluster: ServerCluster, server: tf.distribute.Server, timeout_s: int) -> int:
    """Returns the chief's exit code, which it puts into a queue of this process."""
    with tf.Graph().as_default() as graph:
        with tf.device(f"/job:{cluster.job}/task:{cluster.index}/device:CPU:0"):
            queue = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int32], shapes=[[]], shared_name=END_QUEUE
            )
            size = tf.raw_ops.QueueSizeV2(handle=queue)
            code = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])[0]
        seen_at = time.monotonic()
        # A session waits for all processes that it sees, for ever: this one sees itself alone.
        alone = tf.compat.v1.ConfigProto(
            device_filters=[f"/job:{cluster.job}/task:{cluster.index}"]
        )
        with tf.compat.v1.Session(server.target, graph=graph, config=alone) as session:
            while not session.run(size):
                if is_listening(cluster.chief):
                    seen_at = time.monotonic()
                elif time.monotonic() - seen_at > timeout_s:
                    raise InternalError(
                        "the chief has died, or did not come",
                        received=f"nobody listens on {cluster.chief} for {timeout_s} seconds",
                        fix="see what it says, then start all processes again with --resume",
                    )
                time.sleep(POLL_S)
            ended_with = int(session.run(code))
    # The chief ends after it has said so, and until then it frees what it holds here.
    deadline = time.monotonic() + timeout_s
    while is_listening(cluster.chief) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return ended_with
