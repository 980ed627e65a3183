"""What workers and parameter servers do: serve the chief until it is done or dies."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from conf.errors import ExitCode, InternalError
from training.parameter_server.cluster import SERVER, ServerCluster, is_listening
from training.parameter_server.strategy import END_QUEUE, POLL_S
from training.progress import TrainingProgress

_RESUMABLE = (ExitCode.TERMINATED, ExitCode.INTERRUPTED)


def serve_chief(cluster: ServerCluster, timeout_s: int, progress: TrainingProgress) -> int:
    """Serves the chief of a run, and returns the exit code that the process ends with.

    Args:
        cluster: The processes; this one is a worker or a parameter server.
        timeout_s: Seconds without a sign of life after which the chief is taken for dead.
        progress: Where to tell what happens.

    Returns:
        0 where the chief has trained; 143 or 130 where a signal ended it after it had saved.

    Raises:
        InternalError: The port is taken, the chief did not come, died, or failed.
    """
    server = _start(cluster)
    name = f"{cluster.job} {cluster.index}"
    progress.message(f"serving as {name} of the chief at {cluster.chief}")
    code = _await_end(cluster, server, timeout_s)
    if code == ExitCode.OK:
        progress.message(f"the chief is done: {name} ends")
    elif code in _RESUMABLE:
        progress.message(f"a signal ended the chief, its state is saved: {name} ends")
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
